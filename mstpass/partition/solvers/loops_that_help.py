"""Of a plan whose loops raise the simulated peak, keep the loops that do not.

A loop lowers the memory of its own region, but it may raise that of the step: sums over chunks may
be in float32, and a fused loop computes gradients in the forward that are held until the backward
returns them. If a plan needs more memory than the step without loops, by torch's saved set or by
that of the fewest bytes, the search begins without loops, and gives them back::

    accept(regions): give all of them their loops back, if the peak does not rise;
                     otherwise accept(first half), then accept(second half)

So the peak is never above that of the step without loops, whatever the plan was.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from mstpass.partition.solvers.candidate import Candidate, lowest_saved_set, without_loops
from mstpass.partition.solvers.choose_modes import first_modes
from mstpass.problem.apply_modes import Cycle
from mstpass.problem.problem import CutProblem

_TRIES = 32  # simulations, at most


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
    search = _Search(problem, lowest_saved_set(problem, {**given, **whole}))
    search.accept([(name, given[name]) for name in whole if given[name] != whole[name]])
    return search.best


class _Search:
    """The best plan so far, and the number of simulations that are left."""

    def __init__(self, problem: CutProblem, best: Candidate):
        self.problem, self.best, self.tries = problem, best, _TRIES

    def accept(self, modes: Sequence[tuple[str, str]]) -> None:
        """Put regions in these modes, as far as the peak does not rise."""
        if not modes or not self.tries or self._try(modes) or len(modes) == 1:
            return
        half = len(modes) // 2
        self.accept(modes[:half])
        self.accept(modes[half:])

    def _try(self, modes: Sequence[tuple[str, str]]) -> bool:
        self.tries -= 1
        try:
            found = lowest_saved_set(self.problem, {**self.best.plan.modes, **dict(modes)})
        except (Cycle, nx.NetworkXUnbounded):
            return False
        if not found.simulation.within(self.best.peak_bytes):
            return False
        self.best = found
        return True
