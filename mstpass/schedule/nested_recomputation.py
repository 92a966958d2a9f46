"""Nested recomputation: run the passes of a plan's nested values in the backward graph.

Between two checkpoints the backward recomputes the forward's values, and keeps them until their
gradients are done. A *nested* value in between divides that stretch. It is recomputed in a pass of
its own, of which nothing else is kept::

    saved a -> [block 1] -> nested b -> [block 2]

    backward:   b from a, through block 1; nothing else of block 1 is kept
                block 2 from b, its values kept; gradients of block 2
                block 1 from a once more, its values kept; gradients of block 1

These are two levels of recursive checkpointing (Chen et al., arXiv 1604.06174, section 4.3). With
*inner* nested values there are three: the pass of b computes those of block 1 and drops them; they
have passes of their own later, which begin with a.
memory/simulate_plan.py simulates the same order.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.materialization import materialize
from mstpass.graph.node_copies import copy_nodes
from mstpass.graph.sizes import is_size
from mstpass.torch_internals.opaque_values import is_opaque


def recompute_nested_values(graph: fx.Graph, levels: Sequence[Set[str]]) -> None:
    """Compute each nested value of a backward graph from copies of its operands, in place.

    A pass begins with nested values of its own level and of earlier ones.

    Torch then moves every recomputed node to just before its first use
    (``reordering_to_mimic_autograd_engine``): the copies to before the nested value's readers, the
    originals to where gradients need them.

    Args:
        levels: names of nodes of the graph.
    """
    available: set[fx.Node] = set()  # nested values that have a pass
    for nested in levels:
        for node in list(graph.nodes):
            if node.name not in nested or node.op != "call_function":
                continue
            value = copy_nodes(_recomputed_for(node, available), node)[node]
            if ops.is_pointwise(value):  # otherwise readers would compute it, from operands kept
                value = materialize(value)
            node.replace_all_uses_with(value)
            available.add(value)
            graph.erase_node(node)
    if available:
        graph.eliminate_dead_code()
        graph.lint()


def _recomputed_for(node: fx.Node, available: Set[fx.Node]) -> list[fx.Node]:
    """The node and all nodes that it is computed from, in order, up to the available values."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        other = stack.pop()
        if other.op != "call_function" or other in found or other in available:
            continue
        if is_size(other) or is_opaque(other):
            continue
        found.add(other)
        stack.extend(other.all_input_nodes)
    return [other for other in node.graph.nodes if other in found]
