"""Have a solver solve the partition problem, and check its plan; if it fails, another one does."""

from __future__ import annotations

import dataclasses
import warnings
from typing import NamedTuple

import networkx as nx

from mstpass.limit import Limit
from mstpass.options import Options
from mstpass.partition.budget import peak_limit_bytes
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import must_offload, read_by_backward
from mstpass.problem.solver_registry import Solver
from mstpass.problem.verify import InvalidPlan, checked_plan, verify

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
