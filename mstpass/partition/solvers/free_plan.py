"""The free plan: every saving that costs next to no time, and no loop that saves nothing.

Regions run in their first modes, which are the ones that cost next to no time. Where a mode that
is alike has narrower sums over chunks, is no slower and needs less memory, it takes the first
one's place (choose_modes.py). A region that can do without loops loses them if the step's peak is
no higher then: the peak lies elsewhere. The saved set is that of the fewest bytes which repeats
no heavy op (min_cut.py); of several, the one of the lower peak.

All that together may take more time than the free plan may, or a higher peak than Inductor alone.
free_bounds.py sees to that.

To try each region by itself would take a simulation per region. Regions are tried together:

- A loop in mode *save* keeps for backward what the traced ops would keep. It lowers memory only
  while its region runs. The loops of all such regions are dropped during which, without loops, no
  more bytes are alive than at the peak of the step with loops.
- A loop in mode *fused* or *recompute* keeps less for backward as well. The loops of all such
  regions are dropped whose largest buffer is no larger than the peak. Only values count that are
  certain to have a buffer: a view has none, and most pointwise values are fused into their readers.
  If that raises the peak, each half of these regions is tried.

If that lowers the peak, loops in mode *save* are dropped by the lower peak again. A plan that is
still above the step without loops keeps only the loops that help.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from mstpass.partition.solvers.candidate import (
    TIE,
    Candidate,
    fewest_saved_bytes,
    saving_buffers_first,
)
from mstpass.partition.solvers.choose_modes import whole_modes, with_narrower_sums
from mstpass.partition.solvers.free_bounds import loops_that_help, within_free_time
from mstpass.partition.solvers.min_cut import certain_bytes
from mstpass.problem.problem import SAVE, CutProblem, RegionModes


def free_plan(problem: CutProblem) -> Candidate:
    """The free plan: the answer where no budget is given."""
    return within_free_time(problem, problem.cached(every_saving))


def every_saving(problem: CutProblem) -> Candidate:
    """The free plan, but for its time."""
    search = _Search(problem)
    saving = search.drop_save_loops(frozenset())
    dropped = search.drop_other_loops(saving)
    found = search.without(dropped)
    if TIE * found.peak_bytes < search.without(saving).peak_bytes:
        found = search.without(search.drop_save_loops(dropped - saving))
    return loops_that_help(problem, saving_buffers_first(found))


class _Search:
    """Which regions can do without their loops. Regions are given by name."""

    def __init__(self, problem: CutProblem):
        self.problem, self.better = problem, with_narrower_sums(problem)
        self.optional = {
            region.region: region
            for region in problem.regions
            if not all(mode.loops for mode in region.modes)
        }
        self.without = functools.cache(self._without)

    def _without(self, dropped: frozenset[str]) -> Candidate:
        """The plan in which these regions have no loops, and all others the modes of above."""
        whole = whole_modes(self.problem)
        modes = {name: whole[name] for name in self.optional if name in dropped}
        return fewest_saved_bytes(self.problem, {**self.better, **modes})

    def _drop_more(self, dropped: frozenset[str], more: Iterable[str]) -> frozenset[str]:
        """Drop the loops of more regions, if the peak is no higher."""
        both = dropped.union(more)
        limit = TIE * self.without(dropped).peak_bytes
        return both if self.without(both).simulation.within(limit) else dropped

    def drop_save_loops(self, dropped: frozenset[str]) -> frozenset[str]:
        saving = frozenset(n for n, r in self.optional.items() if _saves(r))
        if not saving:
            return dropped
        limit = TIE * self.without(dropped).peak_bytes
        alive = self.without(dropped | saving).simulation.bytes_at()
        fits = (n for n in saving if _largest(alive, self.optional[n]) <= limit)
        return self._drop_more(dropped, fits)

    def drop_other_loops(self, dropped: frozenset[str]) -> frozenset[str]:
        sizes = certain_bytes(self.problem)
        highest = self.without(dropped).peak_bytes
        fits = [
            name
            for name, region in self.optional.items()
            if not _saves(region) and _largest(sizes, region) <= highest
        ]
        half = len(fits) // 2
        found = self._drop_more(dropped, fits)
        if found == dropped and half:
            return self._drop_more(self._drop_more(dropped, fits[:half]), fits[half:])
        return found


def _saves(region: RegionModes) -> bool:
    return region.modes[0].kind == SAVE


def _largest(sizes: Mapping[str, int], region: RegionModes) -> int:
    """The largest of the bytes given for the members of a region."""
    members = {name for loop in region.modes[0].loops for name in loop.members}
    return max((sizes.get(name, 0) for name in members), default=0)
