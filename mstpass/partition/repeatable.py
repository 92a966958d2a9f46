"""What is slow to compute again in backward, and what must not be."""

from __future__ import annotations

import operator

import torch
from torch import fx

from mstpass.chunk.loop import mst_loop
from mstpass.graph import ops
from mstpass.graph.tokens import Refusal

# Inductor's random numbers: a seed is drawn, the numbers are a function of it and their position.
_OF_A_SEED = frozenset({"prims::inductor_random", "prims::inductor_randint"})
_CHEAP = frozenset(
    {torch.ops.prims.iota.default, torch.ops.aten.arange.start_step, torch.ops.aten.index.Tensor}
)


def is_heavy(node: fx.Node) -> bool:
    """Ops that are slow to repeat: matmuls, attention, whatever the op table does not know."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target is mst_loop or ops.is_matmul(node) or is_pinned(node):
        return True
    return not (node.target in _CHEAP or not isinstance(ops.lookup(node), Refusal))


def is_pinned(node: fx.Node) -> bool:
    """Ops that backward must never repeat: random draws, ops of which nothing is known.

    Sorts are among them: one that is repeated may order ties in another way than the forward did.
    Of loops the plan says which may run again (modes.py).
    """
    if node.op != "call_function" or node.target is operator.getitem or node.target is mst_loop:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if draws(node) or target._schema.name in _OF_A_SEED or ops.is_slow(node):
        return True
    return target.namespace not in ("aten", "prims")


def draws(node: fx.Node) -> bool:
    """Whether the op reads or moves a random state. Attention does so only for its dropout."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True


def shares_storage(node: fx.Node) -> bool:
    """A view, or an item of one: it has no storage of its own."""
    if node.target is operator.getitem:
        return ops.is_view(node.all_input_nodes[0])
    return ops.is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage it shows; itself where that is its own."""
    while shares_storage(node):
        node = node.all_input_nodes[0]
    return node
