"""Give back time that a plan spends for nothing: where the simulated peak stays what it is.

A plan that lowers the peak does so everywhere, but the peak is at one place. A move puts one region
in a faster mode, or saves one heavy value that backward would compute again; light ones gain
little, and there are too many to try. Moves are tried together, and in halves where that raises
the peak::

    accept(moves): all of them, if the peak stays and time falls
                   else accept(first half), then accept(second half)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mstpass.partition.modes import Cycle, with_modes
from mstpass.partition.problem import CutProblem, Mode, Plan, RegionModes
from mstpass.partition.simulate import simulated
from mstpass.partition.solvers.stair import saved_where
from mstpass.partition.verify import recomputed

_OPS = 40_000  # that are simulated, at the most, over all tries
_TRIES = 64

Move = tuple[str, str]  # a region and its mode, or "" and a value


@dataclasses.dataclass
class _State:
    plan: Plan
    peak_bytes: int
    us: float


def relaxed(problem: CutProblem, plan: Plan) -> Plan:
    """A plan of the same simulated peak that takes no more time."""
    step = simulated(problem, plan)
    state = _State(plan, step.peak_bytes, step.us)
    size = len(problem.values) + len(problem.backward)
    relax = _Relax(problem, state, min(_TRIES, _OPS // max(1, size)))
    for rank in range(max((len(r.modes) for r in problem.regions), default=0)):
        relax.accept(relax.region_moves(rank))
    relax.accept(relax.value_moves())
    return relax.state.plan


class _Relax:
    def __init__(self, problem: CutProblem, state: _State, tries: int):
        self.problem = problem
        self.state = state
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
                gains.append((times[now] - times[mode], (region.region, mode)))
        return [move for _, move in sorted(gains, key=lambda pair: -pair[0])]

    def _us(self, region: RegionModes, mode: Mode) -> float:
        """Of the loops, and of members that only other modes' loops compute."""
        by_name = {v.name: v for v in (*self.problem.values, *self.problem.backward)}
        inside = {name for loop in mode.loops for name in loop.members}
        every = {n for other in region.modes for loop in other.loops for n in loop.members}
        return sum(loop.us for loop in mode.loops) + sum(by_name[n].us for n in every - inside)

    def value_moves(self) -> list[Move]:
        """Values to save, what takes longest to compute again for its bytes first."""
        closed = with_modes(self.problem, self.state.plan.modes)
        again = set(recomputed(closed, self.state.plan.saved))
        values = [
            v for v in closed.values if v.name in again and v.savable and v.forward and v.heavy
        ]
        values.sort(key=lambda v: -v.us / max(1, v.bytes))
        return [("", value.name) for value in values]

    def accept(self, moves: Sequence[Move]) -> None:
        if not moves or not self.tries or self._try(moves) or len(moves) == 1:
            return
        half = len(moves) // 2
        self.accept(moves[:half])
        self.accept(moves[half:])

    def _try(self, moves: Sequence[Move]) -> bool:
        self.tries -= 1
        saved = self.state.plan.saved | {value for region, value in moves if not region}
        modes = {**self.state.plan.modes, **{r: mode for r, mode in moves if r}}
        try:
            closed = with_modes(self.problem, modes)
        except Cycle:
            return False
        plan = Plan(
            saved_where(closed, lambda value: value.name in saved), modes, self.state.plan.nested
        )
        step, peak_bytes = simulated(self.problem, plan), self.state.peak_bytes
        if step.us >= self.state.us or not step.within(peak_bytes) or step.peak_bytes != peak_bytes:
            return False
        self.state = _State(plan, peak_bytes, step.us)
        return True
