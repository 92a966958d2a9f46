"""Of which kind of ``Op`` the node of a graph is: what Inductor makes of it."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.collectives import is_wait_op
from mstpass.graph.host_copies import is_wait_for_reload
from mstpass.graph.input_writes import BEFORE_WRITE, is_input_write
from mstpass.graph.joint import value_of
from mstpass.graph.materialization import REALIZE
from mstpass.graph.sizes import hint, is_size
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.views import VIEWS
from mstpass.graph.tokens import Refusal
from mstpass.problem.op import (
    CALL,
    CONSTANT,
    INPUT,
    ITEM,
    POINTWISE,
    REALIZED,
    REDUCTION,
    SCATTER,
    SIZE,
    VIEW,
)

aten = torch.ops.aten

_UNROLLED = 8  # config.unroll_reductions_threshold
# Kinds of ops that run as calls; so do cat, if it copies a part into its place
# (memory/concatenations.py), and cumsum, whose Scan has a loop nest of its own.
_CALLED_KINDS = frozenset({"matmul", "sort", "write", "collective"})
_CALLED = frozenset({aten.cat.default, aten.cumsum.default})
# Calls for which Inductor allocates the result (ExternKernelOut in torch/_inductor/ir.py).
_WRITE_ANYWHERE = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
)
# Kernels that compute the values they write, as reductions do (Scatter in torch/_inductor/ir.py).
_SCATTERS = frozenset(
    {
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten._unsafe_masked_index_put_accumulate.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
    }
)


def kind_of(node: fx.Node) -> str:
    """The kind of a node: one of the constants of problem/op.py."""
    if is_size(node):
        return SIZE
    if node.op == "placeholder":
        return INPUT
    if is_wait_for_reload(node):
        return VIEW
    if is_input_write(node):
        return REALIZED
    kind = kind_of_target(node.target)
    if kind == REDUCTION and num_unrolled(node) > 0:
        return POINTWISE
    return CONSTANT if kind == POINTWISE and ops.is_constant(node) else kind


@functools.cache
def kind_of_target(target: Any) -> str:
    """The kind of op that a call of the target is. Ops that create tensors count as pointwise."""
    if target in VIEWS:
        return ITEM if target is operator.getitem else VIEW
    if is_wait_op(target):  # it returns the memory of the pending result
        return VIEW
    if target in _SCATTERS:
        return SCATTER
    if target is REALIZE:
        return REALIZED
    if target is BEFORE_WRITE:  # it becomes a copy
        return POINTWISE
    row = ops.row_of(target)
    if isinstance(row, Refusal) or row.kind in _CALLED_KINDS or target in _CALLED:
        return CALL
    return REDUCTION if row.kind == "reduce" else POINTWISE


def num_unrolled(node: fx.Node) -> int:
    """How many elements a reduction adds up that runs as a pointwise op; 0 for all other nodes.

    Source: ``Reduction.create`` in torch/_inductor/ir.py.
    """
    if node.op != "call_function" or kind_of_target(node.target) != REDUCTION:
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
    return node.target in _WRITE_ANYWHERE
