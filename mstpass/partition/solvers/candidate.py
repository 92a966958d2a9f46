"""A plan that a search looks at, with the problem it speaks of and its simulation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import must_offload

TIE = 1.005  # peaks up to this factor apart count as equal: the simulation is no more exact


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan, and the problem with the plan's modes chosen. It is simulated when first asked."""

    problem: CutProblem
    plan: Plan

    @functools.cached_property
    def simulation(self) -> StepSimulation:
        return StepSimulation.of(self.problem, self.plan)

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that cross on the device: all are in memory when forward ends, so that the peak is
        no lower."""
        on_device = self.plan.saved - self.plan.offloaded - must_offload(self.problem)
        return sum(v.bytes for v in self.problem.values if v.name in on_device)


def fewest_saved_bytes(problem: CutProblem, modes: Mapping[str, str]) -> Candidate:
    """The plan with these modes that saves the fewest bytes and repeats no heavy op."""
    closed = with_modes(problem, modes)
    return Candidate(closed, Plan(min_cut(closed), modes))


def without_loops(problem: CutProblem) -> Candidate:
    """The step without any loop, which saves the fewest bytes that repeat no heavy op."""
    whole = dataclasses.replace(problem, regions=())
    return Candidate(whole, Plan(min_cut(whole)))
