"""Parts of a graph that are equal but for their names, as the layers of a model are.

What is known of one such part is known of all: it is found, planned and costed once, and the others
are renamed copies. Two parts are *alike* if a walk from a node of each, over operands and users at
once, meets nodes of the same op, arguments, layouts, phase and policy at every step. The walk ends
one node outside of the part, so that what its nodes read, and are read by, is alike as well.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.graph.recompute_rules import policies_of


class Alike:
    """Which parts of one graph are alike."""

    def __init__(self, joint: JointGraph):
        self.joint = joint
        self._tags, self._offloaded = policies_of(joint).tags, policies_of(joint).offloaded
        self._results = {*joint.forward_outputs, *joint.backward_outputs}
        self._known: dict[fx.Node, object] = {}

    def as_in(
        self, part: Collection[fx.Node], one: fx.Node, other: fx.Node
    ) -> dict[fx.Node, fx.Node] | None:
        """The node around ``other`` that each node of a part, and next to it, is around ``one``.

        None if some node is not alike. What both parts share stands for itself.
        """
        found: dict[fx.Node, fx.Node] = {}
        taken: set[fx.Node] = set()
        pairs = [(one, other)]
        while pairs:
            first, second = pairs.pop()
            if first in found:
                if found[first] is not second:
                    return None
                continue
            if first is not second:
                if second in taken or self._looks(first) != self._looks(second):
                    return None
                taken.add(second)
            found[first] = second
            if first is second or first not in part:
                continue
            for nodes, others in (
                (first.all_input_nodes, second.all_input_nodes),
                (list(first.users), list(second.users)),
            ):
                if len(nodes) != len(others):
                    return None
                pairs += zip(nodes, others, strict=True)
        return found

    def _looks(self, node: fx.Node) -> object:
        """What nodes that are alike have in common."""
        if node not in self._known:
            self._known[node] = self._look(node)
        return self._known[node]

    def _look(self, node: fx.Node) -> object:
        if node.op == "get_attr" or node.op == "output":
            return node
        number = {operand: i for i, operand in enumerate(node.all_input_nodes)}
        arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        value = node.meta.get("val")
        layouts = [(repr(t.shape), t.stride(), t.dtype, t.device) for t in tensors_of(value)]
        return (
            node.op,
            node.target if node.op == "call_function" else "",
            repr(arguments),
            repr(layouts or value),
            node in self.joint.backward,
            node in self.joint.forward,
            node in self._results,
            self._tags.get(node, ""),
            node in self._offloaded,
        )
