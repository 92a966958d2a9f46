"""A solver of tests: regions are in mixed mode wherever that is offered."""

from __future__ import annotations

from mstpass.partition.solvers.choose_modes import first_modes
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import MIXED, CutProblem, Plan


def mixed_wherever_possible(problem: CutProblem, budget_bytes: int | None) -> Plan:
    modes = dict(first_modes(problem))
    for region in problem.regions:
        mixed = [mode.name for mode in region.modes if mode.kind == MIXED]
        if mixed:
            modes[region.region] = mixed[0]
    return Plan(min_cut(with_modes(problem, modes)), modes)
