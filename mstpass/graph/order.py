"""Put the nodes of a graph into an order in which each one follows what it reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mstpass.graph.joint import ancestors


class Circle(Exception):
    """A node depends on its own result."""


def put_in_order(graph: fx.Graph) -> None:
    """Move each node to where it was, or earlier where another one needs it.

    Nodes that nothing needs are left out.

    Raises:
        Circle: there is no such order.
    """
    nodes, output = list(graph.nodes), graph.output_node()
    ordered = list(_ordered(nodes))
    for node in ordered:
        if node is not output:
            output.prepend(node)
    unneeded = set(nodes).difference(ordered)
    for node in unneeded:
        node.args, node.kwargs = (), {}
    for node in unneeded:
        graph.erase_node(node)


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
