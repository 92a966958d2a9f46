"""What is slow to compute again in backward, and what must not be."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.token_rules import basic
from mstpass.graph.tokens import Refusal
from mstpass.torch_internals.op_types import OpOverload, schema_of

# Inductor's random numbers: a seed is drawn, the numbers are a function of it and their position.
_OF_A_SEED = frozenset({"prims::inductor_random", "prims::inductor_randint"})
_TIES = frozenset({"sort", "write"})  # sorts, scans, writes by index: ties may fall otherwise
_CHEAP = frozenset(
    {torch.ops.prims.iota.default, torch.ops.aten.arange.start_step, torch.ops.aten.index.Tensor}
)


def is_heavy(node: fx.Node) -> bool:
    """Ops that are slow to repeat: matmuls, attention, whatever the op table does not know."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return _is_dear(node.target) or is_pinned(node)


@functools.cache
def _is_dear(target: Any) -> bool:
    if target is mst_loop or target in basic.MATMULS:
        return True
    return target not in _CHEAP and isinstance(op_table.row_of(target), Refusal)


def is_pinned(node: fx.Node) -> bool:
    """Ops that backward must never repeat: random draws, ops of which nothing is known.

    Sorts are among them: one that is repeated may order ties in another way than the forward did.
    Of loops the plan says which may run again (modes.py).
    """
    if node.op != "call_function" or node.target is operator.getitem or node.target is mst_loop:
        return False
    return _never_again(node.target) or draws(node)


@functools.cache
def _never_again(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return True
    row = op_table.row_of(target)
    if schema_of(target).name in _OF_A_SEED or (isinstance(row, op_table.Op) and row.kind in _TIES):
        return True
    return target.namespace not in ("aten", "prims")


@functools.cache
def _is_seeded(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags


def draws(node: fx.Node) -> bool:
    """Whether the op reads or moves a random state. Attention does so only for its dropout."""
    if not _is_seeded(node.target):
        return False
    target: Any = node.target
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True


def shares_storage(node: fx.Node) -> bool:
    """A view, or an item of one: it has no storage of its own."""
    if node.target is operator.getitem:
        return op_table.is_view(node.all_input_nodes[0])
    return op_table.is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage it shows; itself where that is its own."""
    while shares_storage(node):
        node = node.all_input_nodes[0]
    return node
