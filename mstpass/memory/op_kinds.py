"""Of which kind of ``Op`` the node of a graph is: what Inductor makes of it."""

from __future__ import annotations

import math

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.host_copies import is_rows_on_host, is_wait_for_reload
from mstpass.graph.input_writes import is_input_write
from mstpass.graph.joint import value_of
from mstpass.graph.sizes import hint, is_size
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.problem.op import (
    CONSTANT,
    INPUT,
    ITEM,
    POINTWISE,
    REALIZED,
    REDUCTION,
    SIZE,
    VIEW,
)

aten = torch.ops.aten

_UNROLLED = 8  # config.unroll_reductions_threshold


def kind_of(node: fx.Node) -> str:
    """The kind of a node: one of the constants of problem/op.py."""
    if is_size(node):
        return SIZE
    if node.op == "placeholder":
        return INPUT
    if is_wait_for_reload(node) or is_rows_on_host(node):
        return VIEW
    if is_input_write(node):
        return REALIZED
    kind = ops.row(node).memory_kind
    if kind == ITEM and ops.shares_storage(node):  # a part of what was split
        return VIEW
    if kind == REDUCTION and num_unrolled(node) > 0:
        return POINTWISE
    return CONSTANT if kind == POINTWISE and ops.is_constant(node) else kind


def num_unrolled(node: fx.Node) -> int:
    """How many elements a reduction adds up that runs as a pointwise op; 0 for all other nodes.

    Source: ``Reduction.create`` in torch/_inductor/ir.py.
    """
    if ops.row(node).memory_kind != REDUCTION:
        return 0
    operand, value = value_of(node.all_input_nodes[0]), value_of(node)
    if operand is None or value is None:
        return 0
    sizes = [operand.shape[d] for d in reduced_dims(node, operand.dim())]
    if not all(isinstance(size, int) for size in sizes):
        return 0
    number = math.prod(sizes)
    whole = value.device.type == "cpu" and hint(value.numel()) == 1
    return number if number < _UNROLLED and not whole else 0


def concatenates(node: fx.Node) -> bool:
    """``Op.concatenates``. On a GPU a concatenation of a few values is a pointwise op.

    Source: ``cat`` in torch/_inductor/lowering.py.
    """
    value = value_of(node)
    return (
        node.target is aten.cat.default
        and value is not None
        and value.device.type == "cpu"
        and value.dtype not in (torch.int8, torch.uint8)
        and len(node.all_input_nodes) > 1
    )


def writes_anywhere(node: fx.Node) -> bool:
    """``Op.writes_anywhere``."""
    return ops.row(node).writes_anywhere
