"""What torch's own partitioner does: the graphs that are left to it, and what it saves of others.

Graphs are left to it if our partition problem lacks what they do. Such graphs have writes of other
forms than the update of a buffer (graph/own_ops.py), sizes that depend on data, sends and
receives between two ranks, subgraphs (but for FlexAttention's), or a memory budget that the user
set for a part of the model.

**Inductor alone** would save the values that this partitioner saves. They enter the partition
problem as data (``CutProblem.torch_saved``), with the time and the peak of the step in which they
are saved (``CutProblem.alone``). The search, the promise that no plan needs more memory, and the
report all compare with this one step: with the graph as it was traced, before any rewrite. The
partitioner runs on a copy of that graph, and builds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import OUR_BUDGET
from mstpass.graph.attention import is_flex, is_flex_subgraph
from mstpass.graph.collectives import is_between_two_ranks
from mstpass.graph.joint import JointGraph, Modules, tensors_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.recompute_rules import (
    draws_random_numbers,
    has_effect,
    policies_of,
    unproven_write,
)
from mstpass.graph.sizes import depends_on_data, is_size
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.solvers.candidate import Candidate, by_torch
from mstpass.partition.split import saved_values
from mstpass.plans import SavePlan
from mstpass.problem.op import ITEM, VIEW
from mstpass.problem.problem import RECOMPUTED, Alone, CutProblem, Value
from mstpass.torch_internals.aot_autograd import (
    has_torch_budget,
    min_cut_rematerialization_partition,
    saved_by_torch,
)
from mstpass.torch_internals.graphs import HigherOrderOperator, is_opaque
from mstpass.walk import walk

TORCH_BUDGET = OUR_BUDGET(
    "a part of the model has torch's own budget, which only torch's partitioner obeys"
)


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


def inductor_alone(traced: JointGraph, static_inputs: list[int] | None = None) -> Candidate | str:
    """The step as Inductor alone splits it, or why that is not known.

    Args:
        traced: the joint graph as Inductor's joint passes have left it.
        static_inputs: as AOTAutograd gives them to a partitioner.
    """
    try:
        names = saved_by_torch(traced.copy().module, traced.num_fwd_outputs, static_inputs)
    except Exception as error:  # of torch's own code, whose choice is not needed for a plan
        return f"torch's partitioner fails on this graph: {type(error).__name__}: {error}"
    found = by_torch(_with_torch_saved(cut_problem(traced), names))
    assert found is not None, "by_torch has a plan where it is known what torch saves"
    return found


def with_alone(
    problem: CutProblem, joint: JointGraph, traced: JointGraph, alone: Candidate
) -> CutProblem:
    """The problem of a graph that knows the step under Inductor alone.

    Args:
        joint: the graph, which rewrites may have made from ``traced``.
    """
    saved = (name for kept in alone.plan.saved for name in _holding(joint, traced, kept))
    figures = Alone(alone.us, alone.peak_bytes)
    return dataclasses.replace(_with_torch_saved(problem, saved), alone=figures)


def _holding(joint: JointGraph, traced: JointGraph, name: str) -> Iterator[str]:
    """The nodes of a rewritten graph that hold what a node of the traced graph holds.

    Where that node has no place there, as a product of which rewrites compute only the rows that
    are read, these are what its views have become.
    """
    found = lambda node: joint.standing_for(node.name)
    views = lambda node: () if found(node) else filter(ops.shares_storage, node.users)
    return filter(None, map(found, walk([traced.by_name[name]], views)))


def _with_torch_saved(problem: CutProblem, names: Iterable[str]) -> CutProblem:
    """The problem that knows what torch saves, of the values that it has.

    A view stands for the value that it shows. Inputs of the step and sizes take no memory.
    """
    by_name = {value.name: value for value in problem.values}
    saved = {_base(by_name, name) for name in names if name in by_name}
    kept = [v.name for v in problem.values if v.name in saved and v.savable and not v.free]
    return dataclasses.replace(problem, torch_saved=tuple(kept))


def _base(by_name: dict[str, Value], name: str) -> str:
    """The value that a view, or an item of a split, shows."""
    value = by_name[name]
    while value.kind in (VIEW, ITEM) and not value.savable and value.inputs:
        value = by_name[value.inputs[0]]
    return value.name
