"""Assertions about sizes that the data decides leave the graph: Inductor writes them itself.

Of a size that a mask makes, torch asserts in the graph that it lies within its bounds. Inductor
asserts the same where the size is made (``create_deferred_runtime_asserts`` in
torch/_inductor/graph.py), from what the ``ShapeEnv`` knows. What the graph asserts about other
numbers stays.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import is_size

_ASSERT = torch.ops.aten._assert_scalar.default


def assertions_of_sizes(joint: JointGraph) -> Rewritten:
    """A copy of the graph without them; the graph itself if it has none."""
    names = [node.name for node in joint.nodes if node.target is _ASSERT and _is_of_sizes(node)]
    if not names:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    for name in names:
        rewriting.graph.erase_node(rewriting.joint.by_name[name])
    return rewriting.finished(), frozenset()


def _is_of_sizes(node: fx.Node) -> bool:
    """Whether what is asserted compares sizes of tensors."""
    stack = list(node.all_input_nodes)
    while stack:
        operand = stack.pop()
        value = operand.meta.get("val")
        if operand.target is torch.ops.aten.sym_size.int or operand.op == "placeholder":
            continue
        if not is_size(operand) and not isinstance(value, torch.SymBool):
            return False
        if not operand.all_input_nodes:
            return False
        stack += operand.all_input_nodes
    return bool(node.all_input_nodes)
