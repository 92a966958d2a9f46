"""The nodes on the paths between others."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph.joint import JointGraph


def between(joint: JointGraph, first: fx.Node | None, last: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes of the forward that are computed from ``first`` and lead to the last ones."""
    before = set()
    stack = list(last)
    lowest = -1 if first is None else joint.index[first]
    while stack:
        node = stack.pop()
        if node not in before and joint.index[node] > lowest:
            before.add(node)
            stack.extend(node.all_input_nodes)
    if first is None:
        return before
    found = {first}
    for node in joint.sorted(before):
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found - {first}


def between_each_other(joint: JointGraph, part: Set[fx.Node]) -> set[fx.Node]:
    """The nodes on paths that leave the part and come back to it."""
    first = min(map(joint.index.__getitem__, part))
    before: set[fx.Node] = set()
    stack = list(part)
    while stack:
        for operand in stack.pop().all_input_nodes:
            if joint.index[operand] > first and operand not in part and operand not in before:
                before.add(operand)
                stack.append(operand)
    found: set[fx.Node] = set()
    for node in joint.sorted(before):
        if any(n in part or n in found for n in node.all_input_nodes):
            found.add(node)
    return found - joint.forward
