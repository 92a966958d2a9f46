"""Have a solver solve the partition problem, and check its plan; if it fails, another one does.

A limit means a peak for the plans of one step. If no plan meets a budget in bytes, the user is told
the lowest peak found.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx

from mstpass.byte_sizes import bytes_text
from mstpass.limit import Limit
from mstpass.memory.simulate_ops import StepMemory, Timeline
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.plans import Outcome
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import (
    InvalidPlan,
    checked_plan,
    must_offload,
    read_by_backward,
    verify,
)
from mstpass.problem.solver_registry import Solver

LAST = "min_cut"  # the solver that is asked last, whose plan is simple


class Solved(NamedTuple):
    """A verified plan.

    Attributes:
        solver: the name of the solver that made it.
        notes: why that is not the solver of the options, if it is not, or why it was asked again.
        limit_bytes: the limit on the simulated peak that the solver was asked for.
    """

    plan: Plan
    solver: str
    notes: tuple[str, ...] = ()
    limit_bytes: int | None = None


def solve(problem: CutProblem, options: Options, limit: Limit, left_to_torch: str) -> Solved:
    """The solver's plan; if it fails, another one's, and why.

    Args:
        left_to_torch: why torch's partitioner will choose the saved values of this graph, or "".
            Then only the modes of the plan count, and no valid saved set need exist.
    """
    asked = AUTO if options.solver == "auto" else options.solver
    notes: list[str] = []
    for solver in dict.fromkeys((asked, AUTO)):
        try:
            verified = _verified(solver)
            limit_bytes = peak_limit_bytes(problem, limit, verified)
            return Solved(verified(problem, limit_bytes), solver, tuple(notes), limit_bytes)
        except Exception as error:  # a user's function may raise anything
            said = f"solver {solver!r} failed: {type(error).__name__}: {error}"
            if left_to_torch and not _has_a_plan(problem):
                notes.append(f"{said}; each region runs in its first mode")
                return Solved(Plan(frozenset(), {}), solver, tuple(notes))
            if options.strict:
                raise InvalidPlan(said) from error
            notes.append(f"{said}; {LAST if solver == AUTO else AUTO} solves instead")
            warnings.warn(f"mstpass: {notes[-1]}", stacklevel=2)
    return Solved(SOLVERS[LAST](problem, None), LAST, tuple(notes))


def _has_a_plan(problem: CutProblem) -> bool:
    """Whether a valid saved set exists, which only graphs that torch splits may lack."""
    try:
        _verified(LAST)(problem, None)
    except (InvalidPlan, nx.NetworkXUnbounded):
        return False
    return True


def _verified(name: str) -> Solver:
    """The solver of that name, which raises where its plan is not valid."""

    def solve(problem: CutProblem, budget_bytes: int | None) -> Plan:
        plan = checked_plan(problem, SOLVERS[name](problem, budget_bytes))
        closed = with_modes(problem, plan.modes)
        plan = dataclasses.replace(
            plan, offloaded=plan.offloaded | (plan.saved & must_offload(closed))
        )
        verify(closed.allowing(True), plan.saved, plan.nested, plan.offloaded)
        return dataclasses.replace(plan, saved=read_by_backward(closed, plan.saved))

    return solve


_MISSED = "memory_budget={} cannot be met:"
_SHOWN = 4  # values that a message names
_ADVICE = "Raise memory_budget to at least that much, or use a smaller batch or shorter sequences"


class BudgetError(RuntimeError):
    """No plan stays within the memory budget; the message names the lowest peak found."""


def peak_limit_bytes(problem: CutProblem, limit: Limit, solver: Solver) -> int | None:
    """The limit on the simulated peak that a solver is asked for; None: it is one of time."""
    if limit.is_free:
        return None
    if limit.share is None:
        return limit.peak_bytes
    if limit.is_least:
        return 0  # no plan meets it, so that solvers return the lowest peak that they find
    highest = simulate_plan(problem, solver(problem, None)).peak_bytes
    lowest = simulate_plan(problem, solver(problem, 0)).lowered_peak_bytes
    return int(lowest + limit.share * max(0, highest - lowest))


def over_budget(outcome: Outcome, limit: Limit) -> str:
    """The message that a compiled graph exceeds the budget by Inductor's schedule, or by simulation
    where no schedule was read; "" if it does not.

    Where sizes are symbolic, it is about the largest batch of the plan.
    """
    scheduled, budget = outcome.scheduled_peak_bytes, limit.budget_bytes
    if limit.is_free or budget is None:
        return ""
    if scheduled is None and outcome.no_plan:
        return f"memory_budget={bytes_text(budget)} was not looked at: {outcome.no_plan}"
    if limit.allows(outcome):
        return ""
    missed = next(iter(missed_budgets(outcome.notes)), "")
    if scheduled is None or missed:
        sizes = _of_sizes(outcome)
        return missed if not missed or sizes in missed else f"{missed}. {sizes}"
    return (
        f"{_MISSED.format(bytes_text(budget))} the lowest peak found is {bytes_text(scheduled)}, "
        f"by Inductor's schedule. {_within_by_schedule(outcome, budget)}"
        f"{_cause(outcome)}{_ADVICE}"
    )


def missed_budgets(notes: Sequence[str]) -> tuple[str, ...]:
    """Those of a plan's notes that say that no plan meets a budget."""
    prefix, suffix = _MISSED.split("{}")
    return tuple(note for note in notes if note.startswith(prefix) and suffix in note)


def _within_by_schedule(outcome: Outcome, budget: int) -> str:
    """Which of the batches with a known peak is within the budget, as a sentence.

    Their peaks by the schedule are taken to grow as the simulated ones do.
    """
    if not outcome.peaks:
        return ""
    assert outcome.scheduled_peak_bytes is not None, "the scheduled peak bytes are known"
    largest, *others = outcome.peaks
    over = outcome.scheduled_peak_bytes / max(1, largest.peak_bytes)
    within = next((p for p in others if over * p.peak_bytes <= budget), None)
    known = f"it holds at {sizes_text(within.sizes)}" if within else "it does not hold at a quarter"
    return f"This is at {sizes_text(largest.sizes)}; {known}. "


def _of_sizes(outcome: Outcome) -> str:
    """Which batches a simulated peak is about, and which are within the budget, in two sentences.

    "" if the plan serves one batch.
    """
    if not outcome.peaks:
        return ""
    longest = outcome.budget_holds_for
    holds = f"holds up to {sizes_text(longest)}" if longest else "holds for no length"
    return f"This is at {sizes_text(outcome.peaks[0].sizes)}. The budget {holds}"


def sizes_text(sizes: Sequence[tuple[str, int]]) -> str:
    """Sizes in words, such as ``ids.size()[1] = 300``."""
    return ", ".join(f"{name} = {size}" for name, size in sizes)


def _cause(outcome: Outcome) -> str:
    """Why a budget has no say, as a sentence; "" where it has."""
    if outcome.no_plan:
        return f"There is no plan: {outcome.no_plan}. "
    chose = "torch's partitioner chose what is saved, without a budget"
    return f"{chose}: {outcome.left_to_torch}. " if outcome.left_to_torch else ""


def infeasible(budget: int, memory: StepMemory, outcome: Outcome) -> str:
    """The message that no plan meets a budget: the lowest peak found, and what is alive at it."""
    phase = "forward" if memory.peak is memory.forward else "backward"
    return (
        f"{_MISSED.format(bytes_text(budget))} the lowest peak found is "
        f"{bytes_text(memory.peak_bytes)}, in {phase} at {memory.peak.peak.node}. In memory there: "
        f"{_largest_alive(memory.peak)}. {_cause(outcome)}{_ADVICE}"
    )


def _largest_alive(timeline: Timeline) -> str:
    """The largest values alive at the peak, by name, and the others together."""
    largest = timeline.alive[:_SHOWN]
    shown = ", ".join(f"{m.node} {bytes_text(m.bytes)}" for m in largest)
    others = timeline.alive[_SHOWN:]
    if not others:
        return shown
    return f"{shown}, and {bytes_text(sum(m.bytes for m in others))} in {len(others)} others"
