"""Copies of nodes within one graph, whose names say of what: reports know a node by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

_SUFFIX = "__copy"
_COPY = re.compile(rf"(?P<original>.+?)(?:{_SUFFIX}(?:_\d+)?)+")


def copied(chain: Sequence[fx.Node], before: fx.Node) -> dict[fx.Node, fx.Node]:
    """Copies of the nodes, in this order, before a node of their graph; they read one another."""
    graph = before.graph
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(before):
        for node in chain:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            name = copy_of(node.name)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            copies[node].meta = dict(node.meta)
    return copies


def copy_of(name: str) -> str:
    """A name for a copy; the graph makes it a name of its own."""
    return f"{original_of(name)}{_SUFFIX}"


def original_of(name: str) -> str:
    """The name of what a copy is one of; any other name as it is."""
    found = _COPY.fullmatch(name)
    return found["original"] if found else name
