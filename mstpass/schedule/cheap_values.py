"""Which values of a graph are cheap enough to compute once more for some of their readers."""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.recompute_rules import is_heavy, is_pinned
from mstpass.memory.op_kinds import kind_of
from mstpass.memory.repeated_values import CHEAP_KINDS


def is_cheap(node: fx.Node) -> bool:
    """The kinds of ops that plans count on (memory/program.py), if they may run twice."""
    if node.op != "call_function" or is_heavy(node) or is_pinned(node):
        return False
    return kind_of(node) in CHEAP_KINDS


def viewed(node: fx.Node) -> fx.Node:
    """The value that a view, or a view of a view, shows; any other value itself."""
    while ops.is_cheap_view(node):
        node = node.all_input_nodes[0]
    return node
