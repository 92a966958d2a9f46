"""Sequences of plans: how solvers turn a list of plans into an answer for each budget.

A sequence does not depend on the budget. It begins with fast plans and goes on to plans that need
less memory. The answer for a budget is the first plan whose simulated peak is within it. As every
solver takes the first plan of one fixed sequence, a smaller budget never gives a higher peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import FREE_OVERHEAD, CutProblem, Plan, Value
from mstpass.problem.saved_set import saved_where


@dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """A plan with its simulated peak and its time in microseconds."""

    plan: Plan
    peak_bytes: int
    us: float


def measured(
    problem: CutProblem, modes: Mapping[str, str], keep: Callable[[Value], bool]
) -> MeasuredPlan:
    """The plan with these modes that saves the values for which ``keep`` holds.

    The saved set is that of ``saved_where``.
    """
    closed = with_modes(problem, modes)
    saved = saved_where(closed, keep)
    step = StepSimulation(closed, saved)
    return MeasuredPlan(Plan(saved, dict(modes)), step.peak_bytes, step.us)


def first_within(sequence: Iterable[MeasuredPlan], budget_bytes: int | None) -> Plan:
    """The answer for a budget; the plan of the lowest peak if no plan is within it.

    The *free* plan is the one of the lowest peak among those that take at most ``FREE_OVERHEAD``
    more time than the fastest. It answers the budget None, and the search begins with it.
    """
    plans = list(sequence)
    limit_us = (1 + FREE_OVERHEAD) * min(plan.us for plan in plans)
    free = min((p for p in plans if p.us <= limit_us), key=lambda plan: plan.peak_bytes)
    if budget_bytes is None:
        return free.plan
    rest = plans[plans.index(free) :]
    within = (plan for plan in rest if plan.peak_bytes <= budget_bytes)
    return next(within, min(rest, key=lambda plan: plan.peak_bytes)).plan
