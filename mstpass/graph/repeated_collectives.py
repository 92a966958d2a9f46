"""Collectives that backward may run again, and what must be the same on all ranks then.

Ulysses exchanges queries, keys and values in every layer. If backward cannot exchange them again,
each layer keeps what it received: most of a rank's memory. But a plan that repeats a collective
must be the plan of all ranks, or they wait for each other for ever. So:

- A plan repeats collectives only if all ranks compile the same graph and emit the same sequence of
  them (``Collectives.order``), which ranks tell each other after each compilation
  (``torch_internals/collectives.py``). If they do not, the graph is planned again without.
- One graph of symbolic sizes has several plans, and ranks choose among them by sizes. So all sizes
  that vary must occur in collectives, whose operands have the same size on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from torch import fx

from mstpass.graph import ops
from mstpass.graph.collectives import group_of, is_collective, is_wait
from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.graph.sizes import expression, symbols_of
from mstpass.graph.token_rules.arguments import argument, has_argument


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
    while is_wait(node):
        (node,) = node.all_input_nodes
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
