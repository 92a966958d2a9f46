"""The least time within a memory budget, proven: a mixed-integer program, and simulations.

The program (milp_model.py) knows every choice of modes and saved values, and the exact time of
each. The simulated peak is not a linear function of these choices: plans above the budget are
excluded one by one::

    minimize the time, such that saved bytes <= budget
    loop:
        solve; the optimum bounds the time of every plan from below
        simulate the plan: if its peak is within the budget, it is optimal
        otherwise add a row that excludes exactly this plan

No row excludes a plan whose simulated peak is within the budget. So a plan that is called optimal
is the fastest of all plans without nested values, by the cost model and the simulation, within
``TOLERANCE`` of its time. A proof takes long where many plans of almost equal time are just above
the budget; then the best plan known is returned, with the bound that was reached.

Without a budget there is nothing to prove: the plan is that of ``peak_search``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from mstpass.memory.simulate_plan import step_memory, step_us
from mstpass.partition.solvers.milp_model import Model, Row
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import InvalidPlan, verify

TOLERANCE = 1e-6  # of the time, within which a proven plan is the fastest
TIME_LIMIT_S = 20.0
_FEWER_BYTES = 1e-7  # share of the time that saving everything adds, to prefer fewer bytes


@dataclasses.dataclass(frozen=True)
class Proof:
    """A plan, and how fast the best plan can be.

    Attributes:
        us: time of the step under the plan, in microseconds; infinite if its peak is above the
            budget.
        bound_us: no plan within the budget takes less time.
        proven: no plan is faster by more than ``TOLERANCE``; where ``us`` is infinite, no plan is
            within the budget.
    """

    plan: Plan
    us: float
    bound_us: float
    proven: bool


def milp(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The fastest plan within the budget that is found in ``TIME_LIMIT_S``."""
    if budget_bytes is None:
        return peak_search(problem, None)
    return prove(problem, budget_bytes).plan


def prove(problem: CutProblem, budget_bytes: int, time_limit_s: float = TIME_LIMIT_S) -> Proof:
    """The fastest plan within the budget that is found in the time limit, and how good it is."""
    return _Search(problem, time.monotonic() + time_limit_s).within(budget_bytes)


class _Search:
    def __init__(self, problem: CutProblem, deadline: float):
        self.problem = problem
        self.deadline = deadline
        self.model = Model(problem)
        # The objective is in units that keep it near 1: HiGHS's tolerances are absolute.
        self.unit_us = max(sum(self.model.time().values()) / 1e4, 1e-9)

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _objective(self) -> Row:
        """The time, and a little for each byte: of equal times, the fewest saved bytes."""
        objective = {i: us / self.unit_us for i, us in self.model.time().items()}
        sizes = self.model.saved_bytes()
        total = sum(sizes.values()) or 1.0
        share = _FEWER_BYTES * sum(objective.values()) / total
        return {**objective, **{i: share * size for i, size in sizes.items()}}

    def within(self, budget_bytes: int) -> Proof:
        """The fastest plan within the budget; the loop of the module's docstring."""
        best = peak_search(self.problem, budget_bytes)
        best_us = self._us(best) if self._peak_bytes(best) <= budget_bytes else math.inf
        bound_us = 0.0
        self._add_saved_limit(budget_bytes)
        while self._left_s() > 0:
            found = self.model.solve(self._objective(), self._left_s())
            if found.infeasible:
                bound_us = math.inf
            elif not math.isnan(found.bound):
                bound_us = max(bound_us, (1 - _FEWER_BYTES) * found.bound * self.unit_us)
            if bound_us >= best_us * (1 - TOLERANCE) or bound_us == math.inf:
                return Proof(best, best_us, min(bound_us, best_us), True)
            plan = self._valid(found.x) if found.x is not None else None
            if not found.optimal:  # the time limit was reached
                if plan is not None and self._peak_bytes(plan) <= budget_bytes:
                    best, best_us = min(
                        (best, best_us), (plan, self._us(plan)), key=lambda pair: pair[1]
                    )
                break
            if plan is not None and self._peak_bytes(plan) <= budget_bytes:
                return Proof(plan, self._us(plan), min(bound_us, self._us(plan)), True)
            self.model.exclude(found.x)
        return Proof(best, best_us, bound_us, False)

    def _add_saved_limit(self, budget_bytes: int) -> None:
        """Saved bytes <= budget: all of them are in memory when the forward ends."""
        scale = max(1, budget_bytes)
        row = {i: -size / scale for i, size in self.model.saved_bytes().items() if size}
        self.model.add(row, -budget_bytes / scale)

    # ---- plans -----------------------------------------------------------------------------------
    def _valid(self, x: Any) -> Plan | None:
        """The plan of a solution; None if loops need each other, or rounding made it invalid."""
        plan = self.model.plan(x)
        try:
            verify(with_modes(self.problem, plan.modes).allowing(True), plan.saved)
        except (InvalidPlan, Cycle):
            return None
        return plan

    def _us(self, plan: Plan) -> float:
        return step_us(with_modes(self.problem, plan.modes), plan.saved)

    def _peak_bytes(self, plan: Plan) -> int:
        return step_memory(with_modes(self.problem, plan.modes), plan.saved).peak_bytes
