"""Plans with checkpoints, from those that repeat no heavy op to the one of least memory.

Regions may run with fewer and with more loops that take time (``forms`` of choose_modes.py). These
are *forms* in which a segment of the forward may run, each in three ways: the forward saves

- all that keeps backward from repeating a heavy op,
- the results of ops that are slow for their bytes, attention above all,
- or nothing but what is alive at places.

Forms are mixed: the first layers are the last ones of the backward, where most gradients are in
memory, and run in the leanest form; others can do with a faster one. A loop that keeps results for
the backward loop runs again where they are not saved, and they are kept from there on.

The placements of checkpoint_table.py have these forms for each room. The plan for a budget is the
fastest one that is within it by simulation. Peaks fall along the placements as far as estimates
go, so that a bisection finds it. For the least memory there are two levels of checkpoints, saved
and nested, and more where the peak falls by a larger part than the time grows.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence

import numpy as np

from mstpass.partition.solvers.candidate import (
    TIE,
    Candidate,
    fewest_saved_bytes,
    least_memory_loops,
)
from mstpass.partition.solvers.checkpoint_table import CheckpointTable, Placement
from mstpass.partition.solvers.checkpoints import Chain, slow_results
from mstpass.partition.solvers.choose_modes import forms
from mstpass.partition.solvers.min_cut import complete
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import read_by_backward

_LOWERED = 1.6  # what an estimate may be over a peak that copies of cheap values lower
_ABOVE = 1.1  # the largest room for nested checkpoints, over the peak without them
_SOME = 16  # placements
_FASTER = 8  # placements faster than the one that a bisection finds, which are tried as well


class CheckpointPlans:
    """The placements of a problem with open regions, the fastest first.

    Attributes:
        keeping: the plan of each form that repeats no heavy op.
    """

    def __init__(self, problem: CutProblem, keeping: Sequence[Candidate]):
        self.problem, self.keeping = problem, keeping

    # ---- the placements --------------------------------------------------------------------------
    @functools.cached_property
    def _chain(self) -> Chain:
        closed = [form.problem.allowing(recompute_heavy=True) for form in self.keeping]
        more = [
            (slow_results(form, complete(form, frozenset())), kept.plan.saved)
            for form, kept in zip(closed, self.keeping, strict=True)
        ]
        return Chain(closed, more)

    @functools.cached_property
    def placements(self) -> Sequence[Placement]:
        """Those with any number of levels; none where checkpoints do not lower the peak."""
        return self._table.placements() if self.flat else ()

    @functools.cached_property
    def flat(self) -> Sequence[Placement]:
        """Those without nested checkpoints, for more room."""
        return self._chain.table(self._most_bytes).placements(levels=0)

    @functools.cached_property
    def _table(self) -> CheckpointTable:
        return self._chain.table(self._nested_bytes)

    @property
    def _nested_bytes(self) -> float:
        """The largest room in which nested checkpoints are looked for."""
        return _ABOVE * self.flat[-1].room_bytes if self.flat else 0.0

    @property
    def _most_bytes(self) -> float:
        """The largest room in which checkpoints are looked for."""
        return max((plan.peak_bytes for plan in self.keeping), default=0)

    @property
    def stops_bytes(self) -> int:
        """What is alive at all places together takes so much on the host."""
        return int(np.diagonal(self._chain.costs.pinned_bytes, 1).sum()) if self.placements else 0

    @functools.cached_property
    def _segments(self) -> dict[str, int]:
        """The segment of each region: that of its first value in the forward."""
        index = {value.name: i for i, value in enumerate(self.problem.values)}
        ends = [max(index.get(name, -1) for name in names) for names in self._chain.places]
        found: dict[str, int] = {}
        for region in self.problem.regions:
            members = {n for mode in region.modes for loop in mode.loops for n in loop.members}
            first = min((index[n] for n in members if n in index), default=None)
            if first is not None:
                found[region.region] = bisect.bisect_left(ends, first)
        return found

    def some(self) -> list[Candidate]:
        """The plans of some placements, the fastest first, and the one of least memory."""
        if not self.placements:
            return []
        every = [one for one in self.flat if one.room_bytes > self._nested_bytes]
        every += self.placements
        found = [*self._some_of(every), self.least]
        return [candidate for candidate in found if candidate is not None]

    def by_host(self, host_bytes: int) -> list[Candidate]:
        """Plans whose saved stops are to wait on the host, as many as it holds; others are nested.

        The fastest come first. The last one is that of least memory.
        """
        if not self.placements or not host_bytes:
            return []
        every = self._table.placements(host_bytes=float(host_bytes))
        return self._some_of(every[: every.index(_least_of(every)) + 1] if every else [])

    def _some_of(self, every: Sequence[Placement]) -> list[Candidate]:
        """The plans of some placements, the last one among them."""
        chosen = every[::-1][:: max(1, len(every) // _SOME)][::-1]
        return [candidate for candidate in map(self.candidate, chosen) if candidate is not None]

    def candidate(self, placement: Placement) -> Candidate | None:
        """The plan of a placement; None if its loops need each other's results."""
        forms = [form.plan.modes for form in self.keeping]
        modes = dict(forms[-1])
        for region, segment in self._segments.items():
            number, _ = self._chain.forms[placement.forms[segment]]
            modes[region] = forms[number][region]
        try:
            closed = with_modes(self.problem, modes).allowing(recompute_heavy=True)
        except Cycle:
            return None
        levels = self._chain.levels(placement)
        known = {value.name for value in closed.values}
        kept = frozenset(n for n, level in levels.items() if not level and n in known)
        saved = read_by_backward(closed, complete(closed, kept))
        nested = {n: level for n, level in levels.items() if n in known - saved and level}
        return Candidate(closed, Plan(saved, modes, nested))

    # ---- the plan for a budget -------------------------------------------------------------------
    def within(self, budget_bytes: int) -> Candidate | None:
        """The fastest plan within a budget; None if none is, or no checkpoints are needed."""
        if budget_bytes >= self._most_bytes:
            return None
        placements = self.placements if budget_bytes < self._nested_bytes else self.flat
        rooms = [-placement.room_bytes for placement in placements]
        first = low = bisect.bisect_left(rooms, -_LOWERED * budget_bytes)
        high, fastest = len(rooms), None
        while low < high:
            middle = (low + high) // 2
            found = self.candidate(placements[middle])
            if found is not None and found.lowered_within(budget_bytes):
                high, fastest = middle, found
            else:
                low = middle + 1
        # Copies of cheap values lower some peaks by more than others.
        for number in range(first, high, max(1, (high - first) // _FASTER)):
            found = self.candidate(placements[number])
            if found is not None and found.lowered_within(budget_bytes):
                return found
        return fastest

    @functools.cached_property
    def least(self) -> Candidate | None:
        """The plan of the least memory; None if there is none."""
        if not self.placements:
            return None
        found = _least_of(self._table.placements(levels=1))
        deeper = (one for one in self.placements if one.room_bytes < found.room_bytes)
        return self.candidate(min((found, *deeper), key=_bytes_times_us))

    def lowest(self, levels: int) -> Candidate | None:
        """The plan of the lowest peak with that many levels of nested checkpoints."""
        placements = self._table.placements(levels) if self.flat else ()
        return self.candidate(_least_of(placements)) if placements else None


def checkpoint_plans(problem: CutProblem) -> CheckpointPlans | None:
    """The placements of a problem with open regions, with all forms.

    None if the peak without checkpoints is made of the backward's own values, gradients above all:
    no saved set can lower it.
    """
    loops = problem.cached(least_memory_loops)
    if loops.peak_bytes <= TIE * _own_bytes_at_peak(loops):
        return None
    keeping: list[Candidate] = []
    for modes in forms(problem):
        try:
            keeping.append(fewest_saved_bytes(problem, modes))
        except Cycle:
            continue
    return CheckpointPlans(problem, keeping) if keeping else None


def _own_bytes_at_peak(candidate: Candidate) -> int:
    """Bytes of the backward's own values at the peak, which are there whatever crosses."""
    peak = candidate.simulation.memory.peak
    own = {value.name for value in candidate.problem.backward}
    return sum(moment.bytes for moment in peak.alive if moment.node in own)


def _least_of(placements: Sequence[Placement]) -> Placement:
    """That of the least room; of rooms that count as equal, the fastest."""
    least_bytes = TIE * placements[-1].room_bytes
    return next(one for one in placements if one.room_bytes <= least_bytes)


def _bytes_times_us(placement: Placement) -> float:
    return placement.room_bytes * placement.us
