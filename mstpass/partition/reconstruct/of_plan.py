"""Reconstruction as a change of a plan: fewer saved values, unless that raises the peak."""

from __future__ import annotations

import dataclasses
from typing import Any

from mstpass.graph.joint import JointGraph
from mstpass.limit import Limit
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.reconstruct import reconstruct
from mstpass.passes.facts import ALWAYS, PURE_LOOPS
from mstpass.passes.runner import Pass, PassRunner
from mstpass.plans import Reconstructed
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.verify import verify


@dataclasses.dataclass(frozen=True)
class Reconstruction:
    """A graph in which backward reconstructs values, and the plan that saves fewer."""

    joint: JointGraph
    plan: Plan
    problem: CutProblem
    values: tuple[Reconstructed, ...]


def _reconstruct_values(*args: Any) -> tuple[JointGraph, Any]:
    joint, *found = reconstruct(*args)
    return joint, found


RECONSTRUCT = Pass("reconstruct", _reconstruct_values, (PURE_LOOPS,), (*ALWAYS, PURE_LOOPS))


def with_reconstruction(
    joint: JointGraph,
    problem: CutProblem,
    plan: Plan,
    options: Options,
    limit: Limit,
    runner: PassRunner,
) -> Reconstruction | None:
    """Save fewer values by reconstructing some in backward, unless that raises the peak."""
    pack_masks, saved = not limit.is_free, plan.saved
    allowed = problem.allowing(True)
    reduced, found = runner.run(RECONSTRUCT, joint, allowed, saved, options.reconstruct, pack_masks)
    if reduced is joint:
        return None
    kept, done = found
    repeats = options.repeats_collectives
    other = cut_problem(reduced, (), not limit.is_free, problem.host, repeats)
    verify(other.allowing(True), kept)
    peak_bytes = simulate_plan(problem, plan).peak_bytes
    sets = {"offloaded": plan.offloaded & kept, "by_chunk": plan.by_chunk & kept}
    after = dataclasses.replace(plan, saved=kept, **sets)
    if simulate_plan(other, after).peak_bytes > peak_bytes:
        return None
    return Reconstruction(reduced, after, other, done)
