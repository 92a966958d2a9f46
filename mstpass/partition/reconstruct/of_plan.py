"""Reconstruction as a change of a plan: fewer saved values, unless that raises the peak."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.limit import Limit
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.build_problem import described
from mstpass.partition.reconstruct import reconstruct
from mstpass.partition.reconstruct.rewrite_joint import Rewritten
from mstpass.passes.facts import ALWAYS, PURE_LOOPS
from mstpass.passes.runner import Pass, PassRunner
from mstpass.plans import Reconstructed
from mstpass.problem.problem import CutProblem, Plan, with_needs
from mstpass.problem.verify import verify
from mstpass.walk import walk_once


@dataclasses.dataclass(frozen=True)
class Reconstruction:
    """A graph in which backward reconstructs values, and the plan that saves fewer."""

    joint: JointGraph
    plan: Plan
    problem: CutProblem
    values: tuple[Reconstructed, ...]


def _reconstruct_values(
    joint: JointGraph, *args: Any
) -> tuple[JointGraph, tuple[Rewritten, tuple[Reconstructed, ...]]]:
    rewritten, done = reconstruct(joint, *args)
    return rewritten.joint, (rewritten, done)


RECONSTRUCT = Pass("reconstruct", _reconstruct_values, (PURE_LOOPS,), (*ALWAYS, PURE_LOOPS))


def with_reconstruction(
    joint: JointGraph,
    problem: CutProblem,
    plan: Plan,
    options: Options,
    limit: Limit,
    runner: PassRunner,
) -> Reconstruction | None:
    """Save fewer values by reconstructing some in backward, unless that raises the peak.

    Args:
        problem: the problem in which the plan's modes are chosen, with the names of ``joint``.
    """
    pack_masks, saved = not limit.is_free, plan.saved
    allowed = problem.allowing(True)
    reduced, found = runner.run(RECONSTRUCT, joint, allowed, saved, options.reconstruct, pack_masks)
    if reduced is joint:
        return None
    rewritten, done = found
    other = _with_inverses(problem, joint, rewritten)
    kept = rewritten.saved
    verify(other.allowing(True), kept)
    sets = {"offloaded": plan.offloaded & kept, "by_chunk": plan.by_chunk & kept}
    after = dataclasses.replace(plan, saved=kept, **sets)
    if simulate_plan(other, after).peak_bytes > simulate_plan(problem, plan).peak_bytes:
        return None
    return Reconstruction(reduced, after, other, done)


def _with_inverses(problem: CutProblem, before: JointGraph, rewritten: Rewritten) -> CutProblem:
    """The problem with what was written for the backward, which reads that."""
    joint, read = rewritten.joint, rewritten.read
    others = [node for node in joint.nodes if node not in joint.backward]
    new = [node for node in others if node.name not in before.by_name]
    values = (*problem.values, *problem.backward)
    names = {*(value.name for value in values), *(node.name for node in new)}

    def inputs(node: fx.Node) -> tuple[str, ...]:
        further = lambda n: () if n.name in names else n.all_input_nodes
        return tuple(n.name for n in walk_once(node.all_input_nodes, further) if n.name in names)

    written = (
        dataclasses.replace(value, inputs=inputs(joint.by_name[value.name]))
        for value in described(joint, new, problem.host is not None)
    )
    place = {node.name: number for number, node in enumerate(joint.nodes)}
    left = (value for value in problem.values if value.name in place)
    backward = tuple(
        value.reading(read, value.name) for value in problem.backward if value.name in place
    )
    gradients = tuple(read.get(name, name) for name in problem.gradients)
    ordered = sorted((*left, *written), key=lambda value: place[value.name])
    return dataclasses.replace(
        problem,
        values=with_needs(ordered, backward, gradients),
        backward=backward,
        gradients=gradients,
    )
