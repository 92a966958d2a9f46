"""Collectives: ops in which all ranks of a process group take part.

A functional collective, such as ``_c10d_functional.all_reduce``, returns a *pending* result, which
nothing but its ``wait_tensor`` may read. The wait returns the same memory, complete::

    pending = all_reduce(x, "sum", group)
    y = wait_tensor(pending)

All ranks must run the same collectives in the same order, or they wait for each other for ever.
Ranks may have different plans: their shards may differ in size, and a budget may depend on the free
memory of a device. So nothing about collectives depends on a plan:

- A collective runs once, on whole values. It is *pinned* (graph/recompute_rules.py), so backward
  does not run it again, and it is a member of no region, so no loop runs it once for each chunk.
  Where all ranks agree, backward may repeat it (see below).
- Graphs with loops have their collectives in the order of the graphs without them
  (loops/apply_plans.py). torch's extraction of forward and backward keeps that order, and Inductor
  too (``decide_global_ordering_of_comms`` in torch/_inductor/comms.py).
- A collective runs in the forward or in the backward by what it depends on, as in the traced graph.

The exception is the user's ``torch.utils.checkpoint``: what it covers is recomputed, collectives
included. Which of them backward needs again may depend on the plan, so then the graphs of all ranks
must be alike, sizes included.

Sends and receives between two ranks are left to torch's partitioner.

*Backward may run collectives again*, if something is the same on all ranks then. Ulysses exchanges
queries, keys and values in every layer. If backward cannot exchange them again, each layer keeps
what it received: most of a rank's memory. But a plan that repeats a collective must be the plan of
all ranks, or they wait for each other for ever. So:

- A plan repeats collectives only if all ranks compile the same graph and emit the same sequence of
  them (``Collectives.order``), which ranks tell each other after each compilation
  (``torch_internals/collectives.py``). If they do not, the graph is planned again without.
- One graph of symbolic sizes has several plans, and ranks choose among them by sizes. So all sizes
  that vary must occur in collectives, whose operands have the same size on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.graph.sizes import expression, symbols_of
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.torch_internals.collectives import (
    ALL_TO_ALL_OF_DTENSOR,
    BETWEEN_TWO,
    NAMESPACE,
    WAITS,
)
from mstpass.torch_internals.graphs import OpOverload, schema_of


def is_collective(node: fx.Node) -> bool:
    """Whether the op exchanges data with other ranks. Waiting for the result does not count."""
    return node.op == "call_function" and _is_collective_op(node.target)


def collectives_of(joint: JointGraph) -> tuple[fx.Node, ...]:
    """The collectives of a graph, in its order."""
    return tuple(node for node in joint.nodes if is_collective(node))


def group_of(node: fx.Node) -> str:
    """The name of a collective's process group; empty if it has none."""
    name: Any = argument(node, "group_name") if has_argument(node, "group_name") else ""
    return name if isinstance(name, str) else ""


@functools.cache
def _is_collective_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    name = schema_of(target).name
    return (target.namespace == NAMESPACE and name not in WAITS) or name == ALL_TO_ALL_OF_DTENSOR


def is_wait(node: fx.Node) -> bool:
    """Whether the op waits for a collective; its result has the memory of the pending one."""
    return node.op == "call_function" and is_wait_op(node.target)


@functools.cache
def is_wait_op(target: Any) -> bool:
    return isinstance(target, OpOverload) and schema_of(target).name in WAITS


def is_pending(node: fx.Node) -> bool:
    """Whether the value is complete only after a wait, so that it must not cross to backward."""
    node = ops.behind(node, lambda one: one.target is operator.getitem)
    return is_collective(node) and node.target.namespace == NAMESPACE  # type: ignore[union-attr]


def is_between_two_ranks(node: fx.Node) -> bool:
    """Whether the op is a send or a receive."""
    return is_collective(node) and schema_of(node.target).name in BETWEEN_TWO  # type: ignore[arg-type]


# ---- collectives that backward runs again --------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collectives of a step.

    Attributes:
        groups: the names of their process groups, in the order in which they occur first.
        order: a hash of the sequence in forward and backward.
        repeated: how many of them backward runs again.
    """

    groups: tuple[str, ...]
    order: str
    repeated: int = 0


def may_repeat(node: fx.Node) -> bool:
    """Whether a second run is known to exchange the same, given that all ranks do it."""
    node = ops.behind(node, is_wait)
    return is_collective(node) and ops.row(node).kind == "collective" and bool(group_of(node))


def sizes_agree(joint: JointGraph) -> bool:
    """Whether all ranks of the collectives have batches of the same sizes.

    Operands of a collective have one size on all ranks, unless each rank says how much it sends.
    """
    varying, agreed = set(), set()
    for node in joint.nodes:
        if node.op == "placeholder":
            varying |= _symbols_of_shape(node)
        elif is_collective(node) and may_repeat(node) and _has_equal_parts(node):
            agreed |= _symbols_of_shape(node)
    return varying <= agreed


def _symbols_of_shape(node: fx.Node) -> set[sympy.Symbol]:
    sizes = (size for value in tensors_of(node.meta.get("val")) for size in value.shape)
    return {symbol for size in sizes for symbol in symbols_of(size)}


def _has_equal_parts(node: fx.Node) -> bool:
    """Whether all ranks get and send the same amounts."""
    for name in ("output_split_sizes", "input_split_sizes"):
        parts: Sequence[Any] = argument(node, name) if has_argument(node, name) else ()
        if len({expression(_value(part)) for part in parts}) > 1:
            return False
    return True


def _value(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


def collectives_in(
    traced: Sequence[fx.Node], emitted: Iterable[Sequence[fx.Node]]
) -> Collectives | None:
    """The collectives of a step; None if it has none.

    Args:
        traced: the nodes of the joint graph.
        emitted: those of the forward and of the backward graph.
    """
    before = sum(map(is_collective, traced))
    if not before:
        return None
    groups: dict[str, int] = {}
    sequence: list[tuple[int, str, int]] = []
    for phase, nodes in enumerate(emitted):
        for node in filter(is_collective, nodes):
            group = groups.setdefault(group_of(node), len(groups))  # each rank has its own names
            sequence.append((phase, str(node.target), group))
    order = hashlib.sha256(repr(sequence).encode()).hexdigest()[:16]
    return Collectives(tuple(groups), order, max(0, len(sequence) - before))
