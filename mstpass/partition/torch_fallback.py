"""The graphs that torch's own partitioner splits, because our partition problem lacks what they do.

Such graphs have writes of other forms than the update of a buffer (graph/input_writes.py), sizes
that depend on data, sends and receives between two ranks, subgraphs (but for FlexAttention's), or a
memory budget that the user set for a part of the model.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from mstpass.graph.checkpoint_policies import policies_of
from mstpass.graph.collectives import is_between_two_ranks
from mstpass.graph.flex_attention import is_flex, is_flex_subgraph
from mstpass.graph.input_writes import unproven_write
from mstpass.graph.joint import JointGraph, Modules, tensors_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.recompute_rules import draws_random_numbers, has_effect
from mstpass.graph.sizes import depends_on_data, is_size
from mstpass.partition.split import saved_values
from mstpass.plans import SavePlan
from mstpass.problem.problem import RECOMPUTED
from mstpass.torch_internals.aot_autograd import (
    has_torch_budget,
    min_cut_rematerialization_partition,
)
from mstpass.torch_internals.graphs import HigherOrderOperator, is_opaque

TORCH_BUDGET = "a part of the model has torch's own budget, which only torch's partitioner obeys"


def split_by_torch(joint: JointGraph, **torch_kwargs: Any) -> tuple[Modules, SavePlan]:
    """Forward and backward modules by torch's partitioner, and the values that cross."""
    modules = min_cut_rematerialization_partition(
        joint.module, None, num_fwd_outputs=joint.num_fwd_outputs, **torch_kwargs
    )
    return modules, SavePlan(saved_values(modules, joint), "torch")


def needs_torch(joint: JointGraph) -> str:
    """The reason to leave the graph to torch's partitioner; empty where we split it."""
    if reason := unproven_write(joint):
        return reason
    for node, tag in policies_of(joint).tags.items():
        if tag in RECOMPUTED and draws_random_numbers(node):
            return f"{node.name} draws random numbers inside a checkpoint, which repeats the draw"
    reasons = filter(None, map(_unsupported, joint.nodes))
    return next(reasons, TORCH_BUDGET if has_torch_budget(joint.nodes) else "")


def _unsupported(node: fx.Node) -> str:
    """What our partition problem cannot describe about a node; empty for most nodes."""
    value = node.meta.get("val")
    tensors = list(tensors_of(value))
    if value is not None and not tensors and not is_size(node) and not is_opaque(node):
        return f"{node.name} is neither a tensor nor a size"
    if any(map(depends_on_data, tensors)):
        return f"the size of {node.name} depends on data"
    for user in node.users if node.op == "get_attr" else ():
        if _is_unknown(user):
            return f"{user.name} is the higher-order op {user.target}"
    if node.op == "get_attr" and not (tensors or _is_loop_body(node) or is_flex_subgraph(node)):
        return f"{node.name} is a subgraph"
    if _is_unknown(node):
        return f"{node.name} is the higher-order op {node.target}"
    if node.meta.get("memory_budget") is not None:
        return TORCH_BUDGET
    return f"{node.name} is a send or a receive" if is_between_two_ranks(node) else ""


def _is_unknown(node: fx.Node) -> bool:
    """Whether the node is a higher-order op other than those whose subgraphs we know.

    Most ops with an effect have none.
    """
    is_known = node.target is mst_loop or is_flex(node) or has_effect(node)
    return isinstance(node.target, HigherOrderOperator) and not is_known


def _is_loop_body(node: fx.Node) -> bool:
    return all(user.target is mst_loop for user in node.users)
