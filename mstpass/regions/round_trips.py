"""Paths that leave a region and come back, for which no loop can be written.

::

    queries -> a norm over all heads -> queries      the region begins after the norm
    bias -> this attention -> ... -> next attention  the region ends before the next attention,
       \\________________________________/            and the bias, which both read, is outside

Either way a part of the region stays: the seed, or in the backward what is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set

from torch import fx

from mstpass.walk import walk_once

Neighbors = Callable[[fx.Node], Iterable[fx.Node]]


class Paths:
    """The paths among the members of one phase.

    Args:
        part: the members.
        nodes: all nodes of the graph from the first member to the last one, in order.
    """

    def __init__(self, part: Set[fx.Node], nodes: Sequence[fx.Node]):
        self.part, self.nodes = part, nodes

    def first_round_trip(self) -> fx.Node | None:
        """The first node outside of a path that comes back; None if there is no such path."""
        outside: dict[fx.Node, fx.Node] = {}  # what depends on the part: the first on its path
        for node in self.nodes:
            before = [outside[n] for n in node.all_input_nodes if n in outside]
            if node in self.part:
                if before:
                    return before[0]
            elif before or any(n in self.part for n in node.all_input_nodes):
                outside[node] = before[0] if before else node
        return None

    def after(self, core: Collection[fx.Node]) -> set[fx.Node]:
        """The members to which a path leads from the core by way of a node outside."""
        return self._by_way_of_others(core, self.nodes, lambda node: node.all_input_nodes)

    def to_leave_out(self, core: Collection[fx.Node]) -> set[fx.Node]:
        """The members without which no path from the core, or to it, leaves and comes back.

        These are all before and after the core by way of nodes outside, what is computed from the
        former alone, and the operands of the latter that are not computed from the core.
        """
        before = self._by_way_of_others(core, self.nodes[::-1], lambda node: node.users)
        after = self.after(core)
        members = lambda node: (user for user in node.users if user in self.part)
        from_core = set(walk_once(core, members))
        shared = {n for node in after for n in node.all_input_nodes if n in self.part - from_core}
        for node in self.nodes:
            operands = node.all_input_nodes
            if node in self.part - from_core and operands and before.issuperset(operands):
                before.add(node)
        return before | after | shared

    def _by_way_of_others(
        self, core: Collection[fx.Node], order: Sequence[fx.Node], previous: Neighbors
    ) -> set[fx.Node]:
        inside, by_others = set(core), set[fx.Node]()
        for node in order:
            if any(n in by_others for n in previous(node)):
                by_others.add(node)
            if any(n in inside for n in previous(node)):
                (inside if node in self.part else by_others).add(node)
        return by_others & self.part
