"""Spend the slack of a budget: make a plan faster while its peak stays within the budget.

A plan that lowers the peak saves memory all along the step, but the peak lies at one moment. Where
the budget leaves room, the plan can take time back elsewhere. A *move* saves the results of one
heavy op that backward would repeat, or puts one region in a faster mode. (Light ops win little, and
are too many to try.) Moves are tried together, and by halves if that exceeds the budget::

    accept(moves): make all of them, if the peak stays within the budget and the time falls;
                   otherwise accept(first half), then accept(second half)

Before that, the regions of repeated layers are put in their fastest mode at once, or else in the
second fastest one, and so on, until that is possible.

The number of simulations is limited, so that planning time is. It falls with the size of the graph,
to a few that are left for the largest. They are counted and not timed: all ranks of a job must find
the same plan.

No move is accepted that lowers the peak. Take two budgets whose searches begin with the same plan.
They first differ at a move that only the larger budget accepts, because the peak then exceeds the
smaller one. From there on the peak under the larger budget stays above the smaller budget. So a
smaller budget never gives a higher peak.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from mstpass.partition.solvers.candidate import Candidate, by_halves
from mstpass.partition.solvers.choose_modes import held_bytes, mode_us, op_times
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Plan, RegionModes
from mstpass.problem.saved_set import recomputed_heavy_ops, saved_where

_OPS = 40_000  # ops that all simulations together may have
_TRIES = 64  # simulations, at most
_MODES_OF_LAYERS = 3  # the fastest ones, which regions of repeated layers are put in at once
_LEAST_TRIES = 4  # even where they have more ops: the best eighth of the moves gets its turn


@dataclasses.dataclass(frozen=True)
class _Move:
    """Modes of regions to change, or values to save."""

    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    saved: frozenset[str] = frozenset()


def slack_spent(problem: CutProblem, start: Candidate, budget_bytes: int) -> Candidate:
    """A plan within the budget that takes at most the time of the given one.

    If the given plan exceeds the budget itself, its own peak is the limit. Peaks are those that
    copies of cheap values lower.
    """
    size = len(problem.values) + len(problem.backward)
    limit_bytes = max(budget_bytes, start.lowered_peak_bytes)
    tries = max(_LEAST_TRIES, min(_TRIES, _OPS // max(1, size)))
    search = _Search(problem, start, limit_bytes, tries)
    ranks = range(max((len(r.modes) for r in problem.regions), default=0))
    for alike in _alike_regions(problem):
        fastest = ranks[:_MODES_OF_LAYERS]
        next((r for r in fastest if search.make_several(search.mode_moves(r, alike))), None)
    search.tries = tries
    # before single modes: one may spare a whole chain of ops
    by_halves(search.save_moves(), search.make)
    for rank in ranks:
        by_halves(search.mode_moves(rank, problem.regions), search.make)
    return search.best


def _alike_regions(problem: CutProblem) -> list[list[RegionModes]]:
    """The regions by what their modes are and cost, such as those of repeated layers."""
    found: defaultdict[object, list[RegionModes]] = defaultdict(list)
    for region in problem.regions:
        modes = region.modes
        costs = ((m.name, held_bytes(m), *(loop.us for loop in m.loops)) for m in modes)
        found[tuple(costs)].append(region)
    return [regions for regions in found.values() if len(regions) > 1]


class _Search:
    """The best plan so far, and the number of simulations that are left."""

    def __init__(self, problem: CutProblem, best: Candidate, limit_bytes: int, tries: int):
        self.problem = problem
        self.best = best
        self.limit_bytes = limit_bytes
        self.tries = tries
        self.us = problem.cached(op_times)

    def mode_moves(self, rank: int, regions: Sequence[RegionModes]) -> list[_Move]:
        """For each of these regions the move to its ``rank``-th fastest mode, if it is faster.

        The move that wins most time comes first.
        """
        gains: list[tuple[float, _Move]] = []
        for region in regions:
            now = self.best.plan.modes.get(region.region, region.modes[0].name)
            # No move takes a region's loops away: Inductor may run its ops ahead of their turn,
            # which the simulation does not see.
            loops = [mode for mode in region.modes if mode.loops or mode.name == now]
            times = {mode.name: mode_us(self.us, region, mode) for mode in loops}
            faster = sorted((n for n in times if times[n] < times[now]), key=lambda n: times[n])
            if rank < len(faster):
                mode = faster[rank]
                gains.append((times[now] - times[mode], _Move({region.region: mode})))
        return [move for _, move in sorted(gains, key=lambda pair: -pair[0])]

    def save_moves(self) -> list[_Move]:
        """Moves that each save one heavy op's results; the op slowest for its bytes comes first."""
        closed = with_modes(self.problem, self.best.plan.modes)
        ops = recomputed_heavy_ops(closed, self.best.plan.saved)
        return [_Move(saved=op.results) for op in ops]

    def make_several(self, moves: Sequence[_Move]) -> bool:
        """Make all of the moves, or none; also none of a single one."""
        return len(moves) > 1 and self.make(moves)

    def make(self, moves: Sequence[_Move]) -> bool:
        """Make all the moves, if that wins time, stays within the limit and lowers no peak."""
        if not self.tries:
            return False
        self.tries -= 1
        saved = self.best.plan.saved.union(*(move.saved for move in moves))
        modes = dict(self.best.plan.modes)
        for move in moves:
            modes.update(move.modes)
        try:
            closed = with_modes(self.problem, modes)
        except Cycle:
            return False
        kept = saved_where(closed, lambda value: value.name in saved)
        before, names = self.best.plan, {value.name for value in closed.values}
        nested = {name: level for name, level in before.nested.items() if name in names}
        plan = Plan(kept, modes, nested, before.offloaded & kept, before.by_chunk & kept)
        found = Candidate(closed, plan)
        if found.us >= self.best.us or not found.lowered_within(self.limit_bytes):
            return False
        if found.lowered_peak_bytes < self.best.lowered_peak_bytes:
            return False
        self.best = found
        return True
