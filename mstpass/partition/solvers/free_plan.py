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
free_bounds.py sees to that. A plan that is still above the step without loops keeps only the loops
that help.
"""

from __future__ import annotations

import itertools

from mstpass.partition.solvers.candidate import TIE, Candidate, fewest_saved_bytes
from mstpass.partition.solvers.choose_modes import whole_modes, with_narrower_sums
from mstpass.partition.solvers.free_bounds import (
    LoopSearch,
    large_bytes,
    loops_that_help,
    within_free_time,
)
from mstpass.problem.problem import SAVE, CutProblem


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
