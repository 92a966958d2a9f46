"""The free plan: every saving that costs next to no time, and no loop that saves nothing.

Regions run in their first modes, which are the ones that cost next to no time. Where a mode that
is alike has narrower sums over chunks, is no slower and needs less memory, it takes the first
one's place (choose_modes.py). A region that can do without loops loses them if the step's peak is
no higher then: the peak lies elsewhere. The saved set is that of the fewest bytes which repeats
no heavy op (min_cut.py).

To try each region by itself would take a simulation per region. So the loops of regions with equal
buffers, such as those of repeated layers, are dropped together. Loops in mode *save* come first,
which keep for backward what the traced ops would keep, and of the others those with the smallest
buffers, of which each half is tried where all of them raise the peak.

All that together may take more time than the free plan may, or a higher peak than Inductor alone.
So there are two bounds.

**Time** is at most what Inductor alone would take, and ``free_overhead`` more. The savings of the
free plan cost little each, but a step may have many: chunks that are a little slower than the
whole, and values that torch's partitioner would save and backward computes again. Where they take
too long together, some are given up::

    faster loops    regions go to their fastest loops, and then to no loops, as many as it takes;
                    first those whose loops save the fewest bytes for their time
    more saved      what torch saves is saved too, the last values of the forward first, with the
                    loops and without any
    Inductor alone  its own plan

Of these, the plan of the lowest peak is taken that is within the time.

**The peak**: of a plan whose loops raise it, those that do not are kept. A loop lowers the memory
of its own region, but it may raise that of the step: sums over chunks may be in float32, and a
fused loop computes gradients in the forward that are held until the backward returns them. If a
plan needs more memory than the step without loops, by torch's saved set or by that of the fewest
bytes, the search begins without loops, and gives them back::

    accept(regions): give all of them their loops back, if the peak does not rise;
                     otherwise accept(first half), then accept(second half)

So the peak is never above that of the step without loops, whatever the plan was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import networkx as nx

from mstpass.partition.solvers.candidate import (
    TIE,
    Candidate,
    baseline,
    by_halves,
    by_torch,
    fewest_saved_bytes,
    lowest,
    lowest_saved_set,
    without_loops,
)
from mstpass.partition.solvers.choose_modes import (
    fast_loops,
    first_modes,
    mode_us,
    op_times,
    whole_modes,
    with_narrower_sums,
)
from mstpass.partition.solvers.min_cut import certain_bytes, complete
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import SAVE, CutProblem, Plan, RegionModes

_STEPS = 16  # sizes of a part that are told apart
_TRIES = 32  # simulations, at most


def free_plan(problem: CutProblem) -> Candidate:
    """The free plan: the answer where no budget is given."""
    return within_free_time(problem, problem.cached(every_saving))


def every_saving(problem: CutProblem) -> Candidate:
    """The free plan, but for its time."""
    with_all = fewest_saved_bytes(problem, with_narrower_sums(problem))
    search = LoopSearch(problem, with_all, fewest_saved_bytes, TIE)
    whole = whole_modes(problem)
    optional = [r for r in problem.regions if whole[r.region] != r.modes[0].name]
    kind = lambda region: (region.modes[0].kind != SAVE, large_bytes(problem, region))
    for (keeps_less, _), regions in itertools.groupby(sorted(optional, key=kind), kind):
        moves = [(region.region, whole[region.region]) for region in regions]
        half = len(moves) // 2
        if not search.accept(moves) and keeps_less and half:
            search.accept(moves[:half])
            search.accept(moves[half:])
    return loops_that_help(problem, search.best)


# ---- the bound on its time ----------------------------------------------------------------------
def within_free_time(problem: CutProblem, found: Candidate) -> Candidate:
    """The plan, or a faster one if it takes more time than the free plan may.

    A plan stays as it is where regions must keep their loops, and where nothing is known of what
    Inductor alone would do.
    """
    torchs, alone = problem.cached(by_torch), problem.cached(baseline)
    if torchs is None or not all(map(_may_stay_whole, problem.regions)):
        return found
    limit_us = (1 + problem.free_overhead) * alone.us
    if found.us <= limit_us:
        return found
    now = {**first_modes(problem), **with_narrower_sums(problem)}
    plans = (
        _first_within(limit_us, lambda share: _with_faster_loops(problem, now, share)),
        _first_within(limit_us, lambda share: _with_more_saved(problem, now, share)),
        _first_within(
            limit_us, lambda share: _with_more_saved(problem, whole_modes(problem), share)
        ),
    )
    fit = [p for p in plans if p is not None and p.simulation.within(alone.peak_bytes)]
    return lowest((*fit, torchs))


def _may_stay_whole(region: RegionModes) -> bool:
    return not all(mode.loops for mode in region.modes)


def _first_within(limit_us: float, plan_of: Callable[[float], Candidate]) -> Candidate | None:
    """The plan of the smallest share, from 0 to 1, that is within the time; None if none is."""
    low, high, found = 0, _STEPS + 1, None
    while low < high:
        middle = (low + high) // 2
        try:
            plan = plan_of(middle / _STEPS)
        except (Cycle, nx.NetworkXUnbounded):
            plan = None
        if plan is not None and plan.us <= limit_us:
            high, found = middle, plan
        else:
            low = middle + 1
    return found


def _with_faster_loops(problem: CutProblem, now: Mapping[str, str], share: float) -> Candidate:
    """A share of the moves to faster modes made: first all those to loops, then those to none."""
    us = problem.cached(op_times)
    moves: list[tuple[bool, float, str, str]] = []
    for region in problem.regions:
        times = {mode.name: mode_us(us, region, mode) for mode in region.modes}
        to_none = next((mode for mode in region.modes if not mode.loops), None)
        for mode in filter(None, (fast_loops(us, region), to_none)):
            won_us = times[now[region.region]] - times[mode.name]
            if won_us > 0:
                rank = large_bytes(problem, region) / won_us
                moves.append((mode is to_none, rank, region.region, mode.name))
    some = sorted(moves)[: round(share * len(moves))]
    return fewest_saved_bytes(problem, {**now, **{name: mode for _, _, name, mode in some}})


def large_bytes(problem: CutProblem, region: RegionModes) -> int:
    """The largest buffer that the region has without loops."""
    sizes = problem.cached(certain_bytes)
    members = {n for mode in region.modes for loop in mode.loops for n in loop.members}
    return max((sizes.get(name, 0) for name in members), default=0)


def _with_more_saved(problem: CutProblem, modes: Mapping[str, str], share: float) -> Candidate:
    """A share of what torch saves is saved, and the fewest bytes that repeat no heavy op."""
    closed = with_modes(problem, modes)
    torchs = set(closed.torch_saved or ())
    names = [v.name for v in closed.values if v.name in torchs and v.savable and not v.free]
    kept = frozenset(names[len(names) - round(share * len(names)) :])
    return Candidate(closed, Plan(complete(closed, kept), modes))


def loops_that_help(problem: CutProblem, found: Candidate) -> Candidate:
    """The plan, or one with fewer loops if its peak is above that of the step without loops.

    Only regions that have a mode without loops can lose theirs. The new plan repeats no heavy op.
    """
    if found.simulation.within(problem.cached(without_loops).peak_bytes):
        return found
    return only_loops_that_help(problem, found)


def only_loops_that_help(problem: CutProblem, found: Candidate) -> Candidate:
    """The same, wherever the peak of the plan is."""
    given = {**first_modes(problem), **found.plan.modes}
    whole = {r.region: mode.name for r in problem.regions for mode in r.modes if not mode.loops}
    search = LoopSearch(problem, lowest_saved_set(problem, {**given, **whole}))
    by_halves([(n, given[n]) for n in whole if given[n] != whole[n]], search.accept)
    return search.best


class LoopSearch:
    """The best plan so far, and the number of simulations that are left.

    Args:
        plan_of: the plan with some modes.
        tie: peaks up to this factor apart count as equal.
    """

    def __init__(
        self,
        problem: CutProblem,
        best: Candidate,
        plan_of: Callable[[CutProblem, Mapping[str, str]], Candidate] = lowest_saved_set,
        tie: float = 1.0,
    ):
        self.problem, self.best, self.tries = problem, best, _TRIES
        self.plan_of, self.tie = plan_of, tie

    def accept(self, modes: Sequence[tuple[str, str]]) -> bool:
        """Put regions in these modes, if the peak does not rise."""
        if not self.tries:
            return False
        self.tries -= 1
        try:
            found = self.plan_of(self.problem, {**self.best.plan.modes, **dict(modes)})
        except (Cycle, nx.NetworkXUnbounded):
            return False
        if not found.simulation.within(self.tie * self.best.peak_bytes):
            return False
        self.best = found
        return True
