"""Put the nodes of a graph into an order in which each one follows what it reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mstpass.graph.joint import JointGraph, ancestors
from mstpass.torch_internals.graphs import graph_module


class Circle(Exception):
    """A node depends on its own result."""


def in_order(joint: JointGraph) -> JointGraph:
    """The graph with each node as early as it was, or earlier where another one needs it.

    Nodes that nothing needs are left out.

    Raises:
        Circle: there is no such order.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in _ordered(list(joint.module.graph.nodes)):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    module = graph_module(joint.module, graph)
    module.meta = dict(joint.module.meta)
    return JointGraph(module, joint.num_fwd_outputs)


def _ordered(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    roots = [n for n in nodes if n.op in ("placeholder", "output") or n.is_impure()]
    needed = ancestors(roots)
    done: set[fx.Node] = set()
    for root in nodes:
        if root not in needed:
            continue
        stack, above = [root], set[fx.Node]()  # above: nodes on the stack whose operands are, too
        while stack:
            node = stack[-1]
            waiting = [operand for operand in node.all_input_nodes if operand not in done]
            if waiting and node not in done:
                if not above.isdisjoint(waiting):
                    raise Circle(node.name)
                above.add(node)
                stack.extend(waiting)
                continue
            stack.pop()
            above.discard(node)
            if node not in done:
                done.add(node)
                yield node
