"""The plans that ``peak_search`` walks over: the landmarks of a family, and the plans between them.

Four plans are landmarks, from the fastest to the one of least memory without nested checkpoints
(free_plan.py, low_memory_plans.py):

1. *free*: savings that cost next to no time; where that leaves some out for the time that they
   take together, the plan that has all comes next;
2. *least-memory loops*: every region in the mode that keeps the fewest bytes, in short chunks;
3. *checkpoints with slow results*: what is alive at checkpoints is saved, and the results of ops
   that are slow for their bytes, attention above all; backward repeats everything else;
4. *checkpoints*: backward repeats those ops as well.

Nested checkpoints are no part of the sequence (checkpoint_plans.py).

Between two landmarks lie plans that take the later one up to a position in the forward, and keep
the earlier one after it. The change begins with the first part of the forward because backward
needs its values last: it recomputes them when all others are gone. There are at most 24 steps
between two landmarks. One that changes several regions and reaches the budget is taken region by
region. ::

    sequence = free                            -> region by region, the mode of fewest bytes
               -> least-memory loops           -> checkpoint by checkpoint
               -> checkpoints with slow results    -> checkpoint by checkpoint
               -> checkpoints
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mstpass.partition.solvers.candidate import Candidate, MeasuredPlan, fewest_saved_bytes
from mstpass.partition.solvers.checkpoints import Places
from mstpass.partition.solvers.choose_modes import fewest_bytes_modes, first_loops, first_modes
from mstpass.partition.solvers.free_plan import every_saving, free_plan
from mstpass.partition.solvers.low_memory_plans import (
    checkpointed,
    least_memory_loops,
    with_slow_results,
)
from mstpass.partition.solvers.memory_lower_bounds import highest_call_bytes
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.peak_floor import PeakFloor
from mstpass.partition.solvers.spend_slack import slack_spent
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import InvalidPlan, verify

_FEW_OPS = 500  # a hundred simulations of so many take half a second
_BETWEEN = 24  # plans between two landmarks, at most


class Family:
    """A problem with some of its modes, and the plans that lead to the least memory with them.

    Attributes:
        problem: it has no other modes.
        before: modes of regions, from which the sequence goes on to those of the fewest bytes.
        whole: the problem whose free plan the sequence begins with; None if it does not.
    """

    def __init__(
        self, problem: CutProblem, before: Mapping[str, str], whole: CutProblem | None = None
    ):
        self.problem, self.before, self.whole = problem, before, whole

    @property
    def savings(self) -> tuple[Candidate, ...]:
        """The free plan, but for its time."""
        return () if self.whole is None else (self.whole.cached(every_saving),)

    @property
    def first(self) -> tuple[Candidate, ...]:
        """The fastest plans."""
        if self.whole is None:
            return ()
        free, savings = self.whole.cached(free_plan), self.whole.cached(every_saving)
        return (free,) if savings is free else (free, savings)

    @functools.cached_property
    def least_bytes(self) -> int:
        """No plan of the family has a lower peak."""
        return highest_call_bytes(self.problem)

    @functools.cached_property
    def least_compared_bytes(self) -> int:
        """None of the plans that are compared for the least memory has a lower peak."""
        if self._has_few_ops:
            return self.least_bytes
        closed = self.problem.cached(least_memory_loops).problem
        firsts = (candidate.simulation.least_lowered_bytes for candidate in self.savings)
        return min((closed.cached(PeakFloor).least_bytes, *firsts))

    def landmarks(self) -> Iterator[Candidate]:
        """Landmarks 1, 2 and 4: all that are compared for the least memory of a large graph."""
        yield from self.savings
        yield self.problem.cached(least_memory_loops)
        if plan := self.problem.cached(checkpointed):
            yield plan.candidate

    def sequence(self, budget_bytes: int | None = None) -> Iterator[Candidate]:
        """The plans in order.

        Args:
            budget_bytes: before the first plan within it come those with fewer regions changed.
        """
        problem = self.problem
        yield from self.first
        yield from _towards_fewest_bytes(problem, self.before, budget_bytes)
        upper = problem.cached(least_memory_loops)
        yield upper
        lower = problem.cached(checkpointed)
        if lower is None:
            return
        # A plan whose peak is no higher than that of the checkpoints alone is not before them.
        slow_results = with_slow_results(lower.candidate)
        if is_before := not slow_results.simulation.within(lower.candidate.peak_bytes):
            yield from _towards_checkpoints(upper, slow_results, lower.found.places)
            yield slow_results
            upper = slow_results
        yield from _towards_checkpoints(upper, lower.candidate, lower.found.places)
        yield lower.candidate
        if not is_before and slow_results.peak_bytes < lower.candidate.peak_bytes:
            yield slow_results

    def compared(self) -> Iterator[Candidate]:
        """The plans that are compared for the least memory."""
        return self.sequence() if self._has_few_ops else self.landmarks()

    @property
    def _has_few_ops(self) -> bool:
        return len(self.problem.values) + len(self.problem.backward) <= _FEW_OPS

    @functools.cached_property
    def lowest(self) -> Candidate:
        """The plan of the lowest peak."""
        lowest, *others = sorted(self.compared(), key=lambda candidate: candidate.peak_bytes)
        for other in others:
            if other.simulation.is_lowered_below(lowest.simulation.lowered_peak_bytes):
                lowest = other
        return lowest

    @functools.cached_property
    def least(self) -> MeasuredPlan:
        """The same plan with time spent where that does not raise its peak."""
        return slack_spent(self.problem, self.lowest.plan, 0)


def _towards_fewest_bytes(
    problem: CutProblem, before: Mapping[str, str], budget_bytes: int | None
) -> Iterator[Candidate]:
    """Put region after region in the mode of the fewest bytes, the forward's first region first.

    Regions that are whole until a budget asks for loops have their first mode with loops before.
    The step of several regions that reaches the budget is taken region by region.
    """
    fewest = fewest_bytes_modes(problem)
    before = {**first_modes(problem), **before}
    for modes in ({**fewest, **first_loops(problem)}, fewest):
        regions = [name for name in modes if modes[name] != before[name]]
        plan_at = functools.partial(_with_first_changed, problem, before, modes, regions)
        for done, count in itertools.pairwise((0, *_counts(len(regions)))):
            step = plan_at(count)
            if budget_bytes is not None and step.lowered_within(budget_bytes):
                yield from _not_beyond(step, map(plan_at, range(done + 1, count)))
            yield step
        before = {**before, **modes}


def _with_first_changed(
    problem: CutProblem,
    before: Mapping[str, str],
    modes: Mapping[str, str],
    regions: Sequence[str],
    count: int,
) -> Candidate:
    """The plan in which the first ``count`` of these regions have their new modes."""
    changed = {name: modes[name] for name in regions[:count]}
    return fewest_saved_bytes(problem, {**before, **changed})


def _not_beyond(step: Candidate, plans: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those of the plans that are no slower than a step and have no lower peak.

    A smaller budget, for which the step is above it, would not see a lower one.
    """
    least = step.simulation.lowered_peak_bytes
    for plan in plans:
        if plan.us <= step.us and plan.simulation.lowered_peak_bytes >= least:
            yield plan


def _towards_checkpoints(upper: Candidate, lower: Candidate, places: Places) -> Iterator[Candidate]:
    """Plans that save as ``lower`` does up to a position in the forward, as ``upper`` after it.

    The positions are the checkpoints, and the values that ``lower`` saves besides, such as
    gradients that loops computed: there may be no others.
    """
    problem, plan = lower.problem, lower.plan
    index = {value.name: i for i, value in enumerate(problem.values)}
    positions = sorted({*places, *(index[name] for name in plan.saved)})
    for count in _counts(len(positions))[:-1]:
        position = positions[count - 1]
        alive = {name for place in places if place <= position for name in places[place]}
        before = {name for name in plan.saved if index[name] <= position}
        after = {name for name in upper.plan.saved if index[name] > position}
        saved = frozenset(alive | before | after)
        try:
            verify(problem, saved)
        except InvalidPlan:
            saved = complete(problem, saved)
        yield Candidate(problem, Plan(saved, plan.modes))


def _counts(total: int) -> list[int]:
    """In equal steps from above 0 to ``total``: how much of the change each plan has made."""
    steps = min(total, _BETWEEN)
    return [total * i // steps for i in range(1, steps + 1)]
