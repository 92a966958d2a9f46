"""The least extra time whose simulated peak is within a budget: the default solver.

Five plans are landmarks, from the fastest to the one of least memory (free_plan.py,
low_memory_plans.py):

1. *free*: savings that cost next to no time;
2. *least-memory loops*: every region in the mode that keeps the fewest bytes, in short chunks;
3. *checkpoints with slow results*: what is alive at checkpoints is saved, and the results of ops
   that are slow for their bytes, attention above all; backward repeats everything else;
4. *checkpoints*: backward repeats those ops as well;
5. *nested checkpoints*: backward repeats most blocks twice; only where that lowers the peak.

Between two landmarks lie plans that take the later one up to a position in the forward, and keep
the earlier one after it. The change begins with the first part of the forward because backward
needs its values last: it recomputes them when all others are gone. ::

    sequence = free                            -> region by region, the mode of fewest bytes
               -> least-memory loops           -> checkpoint by checkpoint
               -> checkpoints with slow results    -> checkpoint by checkpoint
               -> checkpoints                  -> nested place by nested place
               -> nested checkpoints
    plan = the first of the sequence within the budget; the one of the lowest peak if none is
    plan = plan with the slack of the budget spent                              (spend_slack.py)

The sequence does not depend on the budget, so a smaller budget never gives a higher peak. For the
budget 0 only the landmarks of large graphs are compared, which takes less time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mstpass.partition.solvers.candidate import Candidate, fewest_saved_bytes
from mstpass.partition.solvers.checkpoints import Places, save_at
from mstpass.partition.solvers.choose_modes import fewest_bytes_modes, first_loops, first_modes
from mstpass.partition.solvers.free_plan import free_plan
from mstpass.partition.solvers.low_memory_plans import (
    Checkpointed,
    checkpointed,
    from_checkpoints,
    least_memory_loops,
    nested_checkpointed,
    with_slow_results,
)
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.spend_slack import with_slack_spent
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.verify import InvalidPlan, verify

_BETWEEN = 24  # plans between two landmarks, at most
_FEW_OPS = 500  # a hundred simulations of so many take half a second


def peak_search(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan of the sequence within the budget; the one of the lowest peak if none is."""
    free = problem.once(free_plan)
    if budget_bytes is None or free.peak_bytes <= budget_bytes:
        return free.plan
    if budget_bytes == 0:
        return with_slack_spent(problem, _lowest(problem).plan, 0)
    for candidate in _sequence(problem):
        if candidate.saved_bytes <= budget_bytes and candidate.simulation.within(budget_bytes):
            return with_slack_spent(problem, candidate.plan, budget_bytes)
    lowest = min((free, *_sequence(problem)), key=lambda candidate: candidate.peak_bytes)
    return with_slack_spent(problem, lowest.plan, budget_bytes)


def _lowest(problem: CutProblem) -> Candidate:
    """The landmark of the lowest peak; one without loops that take time, if it is no higher then.

    Such loops are those of regions that are whole until a budget asks for them.
    """
    lowest = min(_compared(problem), key=lambda candidate: candidate.peak_bytes)
    whole = problem.once(_without_loops_that_take_time)
    if whole is problem:
        return lowest
    other = min(_compared(whole), key=lambda candidate: candidate.peak_bytes)
    return other if other.peak_bytes <= lowest.peak_bytes else lowest


def _without_loops_that_take_time(problem: CutProblem) -> CutProblem:
    regions = tuple(
        region if region.modes[0].loops else dataclasses.replace(region, modes=region.modes[:1])
        for region in problem.regions
    )
    return problem if regions == problem.regions else dataclasses.replace(problem, regions=regions)


def _compared(problem: CutProblem) -> Iterator[Candidate]:
    """The plans that are compared for the least memory."""
    if len(problem.values) + len(problem.backward) <= _FEW_OPS:
        yield problem.once(free_plan)
        yield from _sequence(problem)
    else:
        yield from _landmarks(problem)


def _landmarks(problem: CutProblem) -> Iterator[Candidate]:
    yield problem.once(free_plan)
    yield problem.once(least_memory_loops)
    for plan in (problem.once(checkpointed), problem.once(nested_checkpointed)):
        if plan is not None:
            yield plan.candidate


def _sequence(problem: CutProblem) -> Iterator[Candidate]:
    """The sequence after the free plan."""
    yield from _towards_fewest_bytes(problem)
    upper = problem.once(least_memory_loops)
    yield upper
    lower = problem.once(checkpointed)
    if lower is None:
        return
    places = lower.found.places
    slow_results = with_slow_results(lower.candidate)
    # A plan whose peak is no higher than that of the checkpoints alone does not lie before them.
    if not slow_results.simulation.within(lower.candidate.peak_bytes):
        yield from _towards_checkpoints(upper, slow_results, places)
        yield slow_results
        upper = slow_results
    yield from _towards_checkpoints(upper, lower.candidate, places)
    yield lower.candidate
    nested = problem.once(nested_checkpointed)
    if nested is not None:
        yield from _towards_nested(nested)


def _towards_fewest_bytes(problem: CutProblem) -> Iterator[Candidate]:
    """Put region after region in the mode of the fewest bytes, the forward's first region first.

    Regions that are whole until a budget asks for loops have their first mode with loops before.
    """
    fewest = fewest_bytes_modes(problem)
    before = {**first_modes(problem), **problem.once(free_plan).plan.modes}
    for modes in ({**fewest, **first_loops(problem)}, fewest):
        regions = [name for name in modes if modes[name] != before[name]]
        for count in _counts(len(regions)):
            changed = {name: modes[name] for name in regions[:count]}
            yield fewest_saved_bytes(problem, {**before, **changed})
        before = {**before, **modes}


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


def _towards_nested(nested: Checkpointed) -> Iterator[Candidate]:
    """Plans with nested places up to a position in the forward, and saved ones after it."""
    found, candidate = nested.found, nested.candidate
    every = dict(sorted({**found.places, **found.nested_places}.items()))
    positions = sorted(found.nested_places)
    for count in _counts(len(positions)):
        inner = {place: every[place] for place in positions[:count]}
        places = {place: names for place, names in every.items() if place not in inner}
        checkpoints = save_at(candidate.problem, places, inner)
        yield from_checkpoints(candidate.problem, candidate.plan.modes, checkpoints).candidate


def _counts(total: int) -> list[int]:
    """In equal steps from above 0 to ``total``: how much of the change each plan has made."""
    steps = min(total, _BETWEEN)
    return [total * i // steps for i in range(1, steps + 1)]
