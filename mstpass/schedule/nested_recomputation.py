"""Run the passes of a plan's nested values in the backward graph.

A block between two saved places is recomputed to its end before any of its gradients, and what it
computes on the way stays for them. A *nested* value inside is had in a pass of its own instead::

    saved a -> [block 1] -> nested b -> [block 2]

    backward:   b = block 1 of a, nothing else of it kept
                block 2 of b, recomputed and kept; its gradients
                block 1 of a, recomputed once more and kept; its gradients

These are two of the levels of recursive checkpointing (Chen et al., arXiv 1604.06174, section 4.3).
simulate.py has the same order on the partition problem.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.materialization import materialize
from mstpass.graph.node_copies import copy_nodes
from mstpass.graph.sizes import is_size


def recompute_nested_values(graph: fx.Graph, nested: Set[str]) -> None:
    """Give each nested value that the backward recomputes copies of its own of what it comes from.

    Torch then moves every recomputed node to just before its first use
    (``reordering_to_mimic_autograd_engine``): the copies before what reads the nested value, the
    others to where the gradients need them.
    """
    there: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.name not in nested or node.op != "call_function":
            continue
        ahead = copy_nodes(_pass(node, there), node)[node]
        if ops.is_pointwise(ahead):  # otherwise its operands would be kept, not the value
            ahead = materialize(ahead)
        node.replace_all_uses_with(ahead)
        there.add(ahead)
        graph.erase_node(node)
    if there:
        graph.eliminate_dead_code()
        graph.lint()


def _pass(node: fx.Node, there: Set[fx.Node]) -> list[fx.Node]:
    """What the value is computed from, itself included, in order."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        other = stack.pop()
        if other.op != "call_function" or is_size(other) or other in found or other in there:
            continue
        found.add(other)
        stack.extend(other.all_input_nodes)
    return [other for other in node.graph.nodes if other in found]
