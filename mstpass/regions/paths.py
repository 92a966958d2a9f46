"""The nodes on the paths between others."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.walk import walk_once


def between(joint: JointGraph, first: fx.Node | None, last: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes of the forward that are computed from ``first`` and lead to the last ones."""
    lowest = -1 if first is None else joint.index[first]
    above = lambda nodes: (node for node in nodes if joint.index[node] > lowest)
    before = set(walk_once(above(last), lambda node: above(node.all_input_nodes)))
    if first is None:
        return before
    inside = lambda node: (user for user in node.users if user in before)
    return set(walk_once([first], inside)) - {first}


def between_each_other(joint: JointGraph, part: Set[fx.Node]) -> set[fx.Node]:
    """The nodes on paths that leave the part and come back to it."""
    return set(back_to(joint, part, part)) - joint.forward


def back_to(
    joint: JointGraph, part: Set[fx.Node], sources: Set[fx.Node], ignored: fx.Node | None = None
) -> list[fx.Node]:
    """The nodes on paths from sources in the part back to it, in the graph's order.

    Args:
        ignored: a node that no path leads through.
    """
    first = min(map(joint.index.__getitem__, sources), default=len(joint.index))
    after = lambda nodes: (n for n in nodes if joint.index[n] > first and n is not ignored)
    before = set(walk_once(part, lambda node: after(node.all_input_nodes))) - part
    outside = lambda node: (user for user in node.users if user in before)
    return joint.sorted(set(walk_once(sources, outside)) & before)
