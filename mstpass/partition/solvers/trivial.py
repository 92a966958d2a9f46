"""The two ends: save everything that backward reads, or nothing but what it cannot have otherwise.

Neither looks at the budget. ``save_all`` is what eager autograd keeps; nothing but views and what
only backward uses is computed there. ``recompute_all`` keeps what must not be computed twice, in
the modes that keep least; all else is recomputed from the step's inputs, early and at once, so that
its peak can be above that of plans which save more.
"""

from __future__ import annotations

from mstpass.partition.solvers.plan_sequence import lean_modes, saved_where, whole_modes
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan


def save_all(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """Every value that backward reads; no region in chunks that may do without."""
    modes = whole_modes(problem)
    return Plan(saved_where(with_modes(problem, modes), lambda value: value.forward), modes)


def recompute_all(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """Only what backward can have in no other way."""
    modes = lean_modes(problem)
    return Plan(saved_where(with_modes(problem, modes), lambda value: False), modes)
