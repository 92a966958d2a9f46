"""The least time within a memory budget, proven: a mixed-integer program with lazy memory rows.

The program (program.py) has every choice of modes and saved values, and the exact time of each. The
simulated peak is no linear function of them; it enters as rows that are added when they are
needed::

    least time, such that saved bytes <= budget
    loop:
        solve; its time bounds every plan's from below
        simulate the plan: within the budget? then it is optimal
        add the bounds of this plan's modes (moments.py) that it breaks, valid for these modes alone
        where it breaks none: add a row that excludes exactly this plan

No row excludes a plan whose simulated peak is within the budget, so what is said to be optimal is
so, among all plans, by the cost model and the simulation, within ``TOLERANCE`` of the time. Modes
are tried as a whole, so a proof takes long where many regions have modes that cost almost the same:
then the best plan known is returned with the bound that was reached.

Without a budget: the fewest saved bytes among the plans that take at most ``FREE_OVERHEAD`` more
time than the fastest.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from mstpass.memory.simulate_plan import step_memory, step_us
from mstpass.partition.solvers.memory_lower_bounds import bounds
from mstpass.partition.solvers.milp_model import Program, Row
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.partition.solvers.plan_sequence import FREE_OVERHEAD
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.verify import InvalidPlan, recomputed, verify

TOLERANCE = 1e-6
TIME_LIMIT_S = 20.0
_ROWS = 24  # memory rows that are added at once, at the most
_FEWER_BYTES = 1e-7  # share of the time that saving everything adds to it, to prefer fewer bytes


@dataclasses.dataclass(frozen=True)
class Proof:
    """A plan, and how good it can be at best.

    Attributes:
        us: time of the step under the plan; infinite where its peak is above the budget.
        bound_us: no plan within the budget takes less.
        proven: no plan is better by more than ``TOLERANCE``; with ``us`` infinite, that none is
            within the budget.
    """

    plan: Plan
    us: float
    bound_us: float
    proven: bool


def milp(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The fastest plan within the budget that is found in ``TIME_LIMIT_S``."""
    return prove(problem, budget_bytes).plan


def prove(
    problem: CutProblem, budget_bytes: int | None, time_limit_s: float = TIME_LIMIT_S
) -> Proof:
    """The fastest plan within the budget, and whether that is proven."""
    search = _Search(problem, time.monotonic() + time_limit_s)
    return search.free() if budget_bytes is None else search.within(budget_bytes)


class _Search:
    def __init__(self, problem: CutProblem, deadline: float):
        self.problem = problem
        self.deadline = deadline
        self.program = Program(problem)
        # numbers near 1 in the program: HiGHS's tolerances are absolute
        self.unit_us = max(sum(self.program.time().values()) / 1e4, 1e-9)

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _objective(self) -> Row:
        objective = {i: us / self.unit_us for i, us in self.program.time().items()}
        sizes = self.program.saved_bytes()
        total = sum(sizes.values()) or 1.0
        share = _FEWER_BYTES * sum(objective.values()) / total
        return {**objective, **{i: share * size for i, size in sizes.items()}}

    # ---- without a budget ------------------------------------------------------------------------
    def free(self) -> Proof:
        known = peak_search(self.problem, None)
        fastest = self.program.solve(self._objective(), self._left_s())
        if fastest.x is None:
            return Proof(known, self._us(known), 0.0, False)
        scaled = {i: c / self.unit_us for i, c in self.program.time().items()}
        least = sum(c * fastest.x[i] for i, c in scaled.items())
        self.program.add({i: -c for i, c in scaled.items()}, -(1 + FREE_OVERHEAD) * least)
        sizes = self.program.saved_bytes()
        unit = max(sizes.values(), default=1.0) or 1.0
        fewest = self.program.solve({i: s / unit for i, s in sizes.items()}, self._left_s())
        plan = (self._valid(fewest.x) if fewest.x is not None else None) or known
        return Proof(plan, self._us(plan), fastest.bound * self.unit_us, fewest.optimal)

    # ---- within a budget -------------------------------------------------------------------------
    def within(self, budget_bytes: int) -> Proof:
        best = peak_search(self.problem, budget_bytes)
        best_us = self._us(best) if self._peak_bytes(best) <= budget_bytes else math.inf
        bound_us = 0.0
        scale = max(1, budget_bytes)
        self._add_saved_limit(budget_bytes)
        while self._left_s() > 0:
            found = self.program.solve(self._objective(), self._left_s())
            if found.infeasible:
                bound_us = math.inf
            elif not math.isnan(found.bound):
                bound_us = max(bound_us, (1 - _FEWER_BYTES) * found.bound * self.unit_us)
            if bound_us >= best_us * (1 - TOLERANCE) or bound_us == math.inf:
                return Proof(best, best_us, min(bound_us, best_us), True)
            plan = self._valid(found.x) if found.x is not None else None
            if not found.optimal:  # out of time, with a plan or without
                if plan is not None and self._peak_bytes(plan) <= budget_bytes:
                    best, best_us = min((best, best_us), (plan, self._us(plan)), key=_time)
                break
            if plan is None:
                self.program.exclude(found.x)
                continue
            if self._peak_bytes(plan) <= budget_bytes:
                return Proof(plan, self._us(plan), min(bound_us, self._us(plan)), True)
            if not self._add_rows(plan, budget_bytes, scale):
                self.program.exclude(found.x)
        return Proof(best, best_us, bound_us, False)

    def _add_saved_limit(self, budget_bytes: int) -> None:
        """All that is saved is there when the forward ends, whatever the modes."""
        scale = max(1, budget_bytes)
        row = {i: -size / scale for i, size in self.program.saved_bytes().items() if size}
        self.program.add(row, -budget_bytes / scale)

    def _add_rows(self, plan: Plan, budget_bytes: int, scale: int) -> bool:
        """The bounds that the plan breaks, the most broken first; whether there are any."""
        closed = with_modes(self.problem, plan.modes)
        again = set(recomputed(closed, plan.saved))
        broken = [(b.bytes_of(plan.saved, again), b) for b in bounds(closed)]
        broken = [pair for pair in broken if pair[0] > budget_bytes]
        broken.sort(key=lambda pair: -pair[0])
        others = [self.program.mode[pair] for pair in plan.modes.items()]
        for _, bound in broken[:_ROWS]:
            row: dict[int, float] = {}
            for name, size in bound.saved.items():
                row.update(dict.fromkeys(self.program.saved(name), -size / scale))
            for name, size in bound.again.items():
                row.update(dict.fromkeys(self.program.again(name), -size / scale))
            # with another mode the row must not bind: each y that is 0 gives room for everything
            room = max(0.0, -sum(row.values()) - (budget_bytes - bound.fixed) / scale)
            row.update(dict.fromkeys(others, -room))
            self.program.add(row, -(budget_bytes - bound.fixed) / scale - room * len(others))
        return bool(broken)

    # ---- plans -----------------------------------------------------------------------------------
    def _valid(self, x: Any) -> Plan | None:
        plan = self.program.plan(x)
        try:
            verify(with_modes(self.problem, plan.modes).allowing(True), plan.saved)
        except (InvalidPlan, Cycle):
            return None
        return plan

    def _us(self, plan: Plan) -> float:
        return step_us(with_modes(self.problem, plan.modes), plan.saved)

    def _peak_bytes(self, plan: Plan) -> int:
        return step_memory(with_modes(self.problem, plan.modes), plan.saved).peak_bytes


def _time(pair: tuple[Plan, float]) -> float:
    return pair[1]
