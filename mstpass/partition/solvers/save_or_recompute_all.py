"""The two extreme plans: save everything that backward reads, or recompute everything.

``save_all`` saves what eager autograd saves; backward computes only views, and values that the
forward does not need. ``recompute_all`` saves only what must not be computed twice, and runs every
region in the mode that keeps the fewest bytes. It recomputes everything else from the inputs of the
step at once, so that its peak can be above that of plans which save more.

Neither solver looks at the budget.
"""

from __future__ import annotations

from mstpass.partition.solvers.choose_modes import least_memory_modes, whole_modes
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import saved_where


def save_all(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """Save every value that backward reads, without loops where a region can do without."""
    modes = whole_modes(problem)
    return Plan(saved_where(with_modes(problem, modes), lambda value: value.forward), modes)


def recompute_all(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """Save only the values that backward cannot recompute."""
    modes = least_memory_modes(problem)
    return Plan(saved_where(with_modes(problem, modes), lambda value: False), modes)
