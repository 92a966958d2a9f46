"""What Inductor alone would do with a step: the values that torch's own partitioner saves.

They enter the partition problem as data (``CutProblem.torch_saved``), with the time and the peak of
the step in which they are saved (``CutProblem.alone``). The search, the promise that no plan needs
more memory, and the report all compare with this one step: with the graph as it was traced, before
any rewrite. The partitioner runs on a copy of that graph, and builds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.solvers.candidate import Candidate, by_torch
from mstpass.problem.op import ITEM, VIEW
from mstpass.problem.problem import Alone, CutProblem, Value
from mstpass.torch_internals.aot_autograd import saved_by_torch
from mstpass.walk import walk


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
