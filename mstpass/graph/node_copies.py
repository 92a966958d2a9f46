"""Copies of nodes within one graph.

The name of a copy tells the original, because reports and plans know a node by its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

_SUFFIX = "__copy"
_COPY = re.compile(rf"(?P<original>.+?)(?:{_SUFFIX}(?:_\d+)?)+")


def copy_nodes(nodes: Sequence[fx.Node], before: fx.Node) -> dict[fx.Node, fx.Node]:
    """Copy nodes, in this order, to the place before another node of their graph.

    A copy reads the copies of its operands where there are any, otherwise the operands themselves.

    Returns:
        The copy of each node.
    """
    graph = before.graph
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(before):
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            name = copy_name(node.name)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            copies[node].meta = dict(node.meta)
    return copies


def copy_name(name: str) -> str:
    """The name to ask for when a node is copied; the graph adds a number if it is taken."""
    return f"{original_name(name)}{_SUFFIX}"


def original_name(name: str) -> str:
    """The name of the node that a copy was made from; any other name comes back as it is."""
    copy = _COPY.fullmatch(name)
    return copy["original"] if copy else name
