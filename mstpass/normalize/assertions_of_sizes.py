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
from mstpass.graph.rewriting import Rewritten, rewritten
from mstpass.graph.sizes import is_size
from mstpass.walk import walk_once

_ASSERT = torch.ops.aten._assert_scalar.default


def assertions_of_sizes(joint: JointGraph) -> Rewritten:
    """A copy of the graph without them; the graph itself if it has none."""
    found = (node for node in joint.nodes if node.target is _ASSERT and _is_of_sizes(node))
    return rewritten(joint, found, lambda rewriting, node: rewriting.graph.erase_node(node))


def _is_of_sizes(node: fx.Node) -> bool:
    """Whether what is asserted compares sizes of tensors."""
    operands = walk_once(node.all_input_nodes, lambda n: () if _is_given(n) else n.all_input_nodes)
    computed = (n for n in operands if not _is_given(n))
    of_sizes = all(n.all_input_nodes and _is_of_size(n) for n in computed)
    return bool(node.all_input_nodes) and of_sizes


def _is_given(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int or node.op == "placeholder"


def _is_of_size(node: fx.Node) -> bool:
    return is_size(node) or isinstance(node.meta.get("val"), torch.SymBool)
