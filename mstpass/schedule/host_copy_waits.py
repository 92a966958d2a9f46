"""Keep the copies to the host and back at their places among the ops of a finished graph."""

from __future__ import annotations

from torch import fx

from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.host_copies import is_host_copy
from mstpass.graph.joint import value_of
from mstpass.graph.recompute_rules import is_heavy, is_pinned
from mstpass.schedule.delay_recomputation import Waits
from mstpass.torch_internals.graphs import OpOverload


def host_copy_waits(graph: fx.Graph) -> Waits:
    """What keeps each copy, and each wait for one, between the heavy ops around it.

    Inductor's scheduler knows only what depends on what. It might begin all copies of a backward at
    once, so that all values are back on the device from the start, or end them all at the end of a
    forward. So each of them waits for the heavy op in front of it, and the next heavy op for it.
    """
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
    before: fx.Node | None = None
    pending: list[fx.Node] = []
    for node in graph.nodes:
        if is_host_copy(node):
            if before is not None and before not in node.all_input_nodes:
                waits[node] = (before,)
            pending.append(node)
        elif _is_anchor(node):
            others = tuple(other for other in pending if other not in node.all_input_nodes)
            if others:
                waits[node] = others
            pending, before = [], node
    return waits


def _is_anchor(node: fx.Node) -> bool:
    """Whether other nodes may wait for the node, and it for them: a matmul or attention."""
    if not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    return is_heavy(node) and not is_pinned(node) and value_of(node) is not None
