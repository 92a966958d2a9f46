"""Give back time that a plan spends for nothing: where the budget leaves room.

A plan that lowers the peak does so everywhere, but the peak is at one place. A move puts one region
in a faster mode, or saves what one heavy op gives that backward would compute again; light ones
gain little, and there are too many to try. Moves are tried together, and in halves where that
exceeds the budget::

    accept(moves): all of them, if the peak is within the budget and time falls
                   else accept(first half), then accept(second half)

No move that is accepted lowers the peak: where two budgets part, the plan of the larger one is
above the smaller one from there on, so that less budget never means a higher peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers.plan_sequence import saved_where
from mstpass.partition.solvers.recomputed_heavy_ops import repeated
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Mode, Plan, RegionModes

_OPS = 40_000  # that are simulated, at the most, over all tries
_TRIES = 64


@dataclasses.dataclass(frozen=True)
class Move:
    """A region's mode, or values to save."""

    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    saved: frozenset[str] = frozenset()


@dataclasses.dataclass
class _State:
    plan: Plan
    peak_bytes: int
    us: float


def relaxed(problem: CutProblem, plan: Plan, budget_bytes: int) -> Plan:
    """A plan within the budget that takes no more time; of the same peak where that is above."""
    step = simulate_plan(problem, plan)
    state = _State(plan, step.peak_bytes, step.us)
    size = len(problem.values) + len(problem.backward)
    limit = max(budget_bytes, step.peak_bytes)
    relax = _Relax(problem, state, limit, min(_TRIES, _OPS // max(1, size)))
    for rank in range(max((len(r.modes) for r in problem.regions), default=0)):
        relax.accept(relax.region_moves(rank))
    relax.accept(relax.value_moves())
    return relax.state.plan


class _Relax:
    def __init__(self, problem: CutProblem, state: _State, limit_bytes: int, tries: int):
        self.problem = problem
        self.state = state
        self.limit_bytes = limit_bytes
        self.tries = tries

    def region_moves(self, rank: int) -> list[Move]:
        """To the mode of each region that is fastest but for ``rank``, what gains most first."""
        gains: list[tuple[float, Move]] = []
        for region in self.problem.regions:
            now = self.state.plan.modes.get(region.region, region.modes[0].name)
            # Inductor runs a whole region ahead of its turn, which the simulation does not see.
            loops = [mode for mode in region.modes if mode.loops or mode.name == now]
            times = {mode.name: self._us(region, mode) for mode in loops}
            faster = sorted((n for n in times if times[n] < times[now]), key=lambda n: times[n])
            if rank < len(faster):
                mode = faster[rank]
                gains.append((times[now] - times[mode], Move({region.region: mode})))
        return [move for _, move in sorted(gains, key=lambda pair: -pair[0])]

    def _us(self, region: RegionModes, mode: Mode) -> float:
        """Of the loops, and of members that only other modes' loops compute."""
        by_name = {v.name: v for v in (*self.problem.values, *self.problem.backward)}
        inside = {name for loop in mode.loops for name in loop.members}
        every = {n for other in region.modes for loop in other.loops for n in loop.members}
        return sum(loop.us for loop in mode.loops) + sum(by_name[n].us for n in every - inside)

    def value_moves(self) -> list[Move]:
        """What heavy ops give, what takes longest to compute again for its bytes first."""
        closed = with_modes(self.problem, self.state.plan.modes)
        return [Move(saved=heavy.results) for heavy in repeated(closed, self.state.plan.saved)]

    def accept(self, moves: Sequence[Move]) -> None:
        if not moves or not self.tries or self._try(moves) or len(moves) == 1:
            return
        half = len(moves) // 2
        self.accept(moves[:half])
        self.accept(moves[half:])

    def _try(self, moves: Sequence[Move]) -> bool:
        self.tries -= 1
        saved = self.state.plan.saved.union(*(move.saved for move in moves))
        modes = dict(self.state.plan.modes)
        for move in moves:
            modes.update(move.modes)
        try:
            closed = with_modes(self.problem, modes)
        except Cycle:
            return False
        kept = saved_where(closed, lambda value: value.name in saved)
        nested = self.state.plan.nested & {value.name for value in closed.values}
        plan = Plan(kept, modes, nested)
        step = simulate_plan(self.problem, plan)
        if step.us >= self.state.us or not step.within(self.limit_bytes):
            return False
        if step.peak_bytes < self.state.peak_bytes:
            return False
        self.state = _State(plan, step.peak_bytes, step.us)
        return True
