"""The least extra time whose simulated peak is within a budget: the default solver.

Six plans are landmarks, from the fastest to the one of least memory (free_plan.py,
low_memory_plans.py):

1. *free*: savings that cost next to no time;
2. *least-memory loops*: every region in the mode that keeps the fewest bytes, in short chunks;
3. *checkpoints with slow results*: what is alive at checkpoints is saved, and the results of ops
   that are slow for their bytes, attention above all; backward repeats everything else;
4. *checkpoints*: backward repeats those ops as well;
5. *nested checkpoints*: backward repeats most blocks twice; only where that lowers the peak;
6. *twice nested checkpoints*: three times; where that lowers the peak more than it costs time.

Between two landmarks lie plans that take the later one up to a position in the forward, and keep
the earlier one after it. The change begins with the first part of the forward because backward
needs its values last: it recomputes them when all others are gone. ::

    sequence = free                            -> region by region, the mode of fewest bytes
               -> least-memory loops           -> checkpoint by checkpoint
               -> checkpoints with slow results    -> checkpoint by checkpoint
               -> checkpoints                  -> nested place by nested place
               -> nested checkpoints          -> inner place by inner place
               -> twice nested checkpoints
    plan = the first of the sequence within the budget; the one of the lowest peak if none is
    plan = plan with the slack of the budget spent                              (spend_slack.py)

The sequence does not depend on the budget, but for its last stretch, which is left out where the
last landmark is not within the budget. So a smaller budget never gives a higher peak. For the
budget 0 only the landmarks of large graphs are compared, which takes less time.

Attention is whole until a budget asks for its loops, which take time. *Families* of plans, without
such loops and with more and more of them, have each a sequence of their own (families.py). The
fastest plan within the budget is taken. Each family's plan of least memory competes as well, with
what the budget leaves spent on time.

Where saved values may wait on the host (``CutProblem.host``), plans of the sequence that exceed the
budget are tried with values offloaded (offload.py): the first one that is then within the budget,
and two behind it. So are checkpoints that are chosen for the host, with slow results and without.
For the least memory, these and the landmarks are tried.

A peak is the one that is left once backward computes some cheap values twice
(memory/repeated_values.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from mstpass.memory.repeated_values import MOST_LOWERED
from mstpass.partition.solvers.candidate import TIE, Candidate, fewest_saved_bytes
from mstpass.partition.solvers.checkpoints import Places, save_at
from mstpass.partition.solvers.choose_modes import fewest_bytes_modes, first_loops, first_modes
from mstpass.partition.solvers.families import families
from mstpass.partition.solvers.free_plan import free_plan
from mstpass.partition.solvers.low_memory_plans import (
    Checkpointed,
    checkpointed,
    checkpointed_by_host,
    from_checkpoints,
    least_memory_loops,
    nested_checkpointed,
    twice_nested_checkpointed,
    with_slow_results,
)
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.offload import (
    fits_with_host,
    offloaded_for_least_memory,
    offloaded_within,
)
from mstpass.partition.solvers.plan_sequence import MeasuredPlan
from mstpass.partition.solvers.spend_slack import slack_spent
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.verify import InvalidPlan, verify

_BETWEEN = 24  # plans between two landmarks, at most
_LOOKED_AT = 8  # plans of a sequence that are tried with values on the host, at first
_FEW_OPS = 500  # a hundred simulations of so many take half a second
_THIRD_LEVEL = 1.25  # a third level of checkpoints does not lower the peak by a larger factor


def peak_search(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The fastest of the plans that the families have for the budget; see above."""
    free = problem.once(free_plan)
    if budget_bytes is None or free.peak_bytes <= budget_bytes:
        return free.plan
    every_family = problem.once(families)
    found = [p for f in every_family for p in _within(f, budget_bytes)] if budget_bytes else []
    least = problem.once(_least)
    if found:
        if least.peak_bytes <= budget_bytes:
            found.append(slack_spent(problem, least.plan, budget_bytes))
        return min(found, key=_us).plan
    return _least_offloaded(problem, least).plan if _uses_host(problem) else least.plan


# ---- with values on the host -------------------------------------------------------------------
def _uses_host(problem: CutProblem) -> bool:
    return problem.host is not None and problem.host.budget_bytes > 0


def _with_offloading(tried: Sequence[Candidate], budget_bytes: int) -> Iterator[Candidate]:
    """Plans of a sequence that are within the budget with values offloaded.

    Earlier plans are faster, but need more copies, for which the device may have to wait; later
    ones may save too little to be helped. So some of all are looked at, and of the first one that
    is within the budget those just before it.
    """
    looked_at = sorted({len(tried) * i // _LOOKED_AT for i in range(_LOOKED_AT)})
    within = [i for i in looked_at if tried and fits_with_host(tried[i], budget_bytes)]
    if not within:
        return
    low = max((i + 1 for i in looked_at if i < within[0]), default=0)
    high = within[0]
    while low < high:
        middle = (low + high) // 2
        if fits_with_host(tried[middle], budget_bytes):
            high = middle
        else:
            low = middle + 1
    for i in sorted({high, within[len(within) // 2], within[-1]}):
        if found := offloaded_within(tried[i], budget_bytes):
            yield found


def _checkpoints_by_host(problem: CutProblem) -> Iterator[Candidate]:
    found = problem.once(checkpointed_by_host)
    if found is not None:
        yield with_slow_results(found)
        yield found


def _least_offloaded(problem: CutProblem, least: MeasuredPlan) -> MeasuredPlan:
    """The fastest of the plans that have the lowest peak, this one among them.

    Peaks of which the simulation cannot tell which is lower count as equal.
    """
    plans = [least]
    for family in problem.once(families):
        every = (*_landmarks(family), *_checkpoints_by_host(family))
        found = [c for candidate in every if (c := offloaded_for_least_memory(candidate))]
        found.sort(key=lambda candidate: (candidate.peak_bytes, candidate.simulation.us))
        plans += [slack_spent(problem, candidate.plan, 0) for candidate in found[:1]]
    lowest = min(plan.peak_bytes for plan in plans)
    return min((p for p in plans if p.peak_bytes <= TIE * lowest), key=lambda plan: plan.us)


# ---- without -----------------------------------------------------------------------------------
def _within(family: CutProblem, budget_bytes: int) -> list[MeasuredPlan]:
    """The plans of a family that are within the budget, with its slack spent."""
    plans = [candidate.plan for candidate in _firsts(family, budget_bytes)]
    if _lowered(family.once(_lowest)) <= budget_bytes:
        plans.append(family.once(_least_of_family).plan)
    return [slack_spent(family, plan, budget_bytes) for plan in plans]


def _firsts(problem: CutProblem, budget_bytes: int) -> list[Candidate]:
    """The first plan of the sequence that is within the budget, and the fastest with values on the
    host, if there are any."""
    found: list[Candidate] = []
    tried: list[Candidate] = []
    sequence = itertools.chain([problem.once(free_plan)], _sequence(problem, budget_bytes))
    for candidate in sequence:
        if candidate.saved_bytes <= budget_bytes:
            if candidate.simulation.lowered_within(budget_bytes):
                found.append(candidate)
                break
        tried.append(candidate)
    if _uses_host(problem):
        by_host = (offloaded_within(c, budget_bytes) for c in _checkpoints_by_host(problem))
        every = [*_with_offloading(tried, budget_bytes), *(c for c in by_host if c is not None)]
        found += sorted(every, key=lambda candidate: candidate.simulation.us)[:1]
    return found


def _least_of_family(family: CutProblem) -> MeasuredPlan:
    """A family's plan of least memory, without a third level of checkpoints."""
    return slack_spent(family, family.once(_lowest).plan, 0)


def _least(problem: CutProblem) -> MeasuredPlan:
    """The plan of least memory of all families, without values on the host."""
    every_family = problem.once(families)
    lowest = min((family.once(_lowest) for family in every_family), key=_lowered)
    for family in reversed(every_family):  # the last ones have the lowest peaks
        if last := _third_level(family, _lowered(lowest)):
            lowest = last.candidate
    return slack_spent(problem, lowest.plan, 0)


def _lowest(problem: CutProblem) -> Candidate:
    """The plan of the sequence with the lowest peak."""
    lowest, *others = sorted(_compared(problem), key=lambda candidate: candidate.peak_bytes)
    for candidate in others:
        if candidate.peak_bytes > MOST_LOWERED * _lowered(lowest):
            break
        lowest = min(lowest, candidate, key=_lowered)
    return lowest


def _lowered(candidate: Candidate) -> int:
    return candidate.simulation.lowered_peak_bytes


def _us(plan: MeasuredPlan) -> float:
    return plan.us


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


def _sequence(problem: CutProblem, budget_bytes: int | None = None) -> Iterator[Candidate]:
    """The sequence after the free plan.

    Args:
        budget_bytes: a third level of checkpoints is left out where its peak is above this.
    """
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
    if nested is None:
        return
    yield from _towards_nested(nested)
    if budget_bytes is None:
        last = problem.once(twice_nested_checkpointed)
    else:
        last = _third_level(problem, budget_bytes)
    if last is not None:
        yield from _towards_nested(last)


def _third_level(problem: CutProblem, limit_bytes: int) -> Checkpointed | None:
    """The plan with three levels of checkpoints, where it is within the limit.

    The search for it takes as long as that for two levels, so it is left out where it is in vain.
    """
    nested = problem.once(nested_checkpointed)
    if nested is None or nested.candidate.peak_bytes > _THIRD_LEVEL * limit_bytes:
        return None
    last = problem.once(twice_nested_checkpointed)
    return last if last and last.candidate.simulation.lowered_within(limit_bytes) else None


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
    """Plans with the places up to a position in the forward, each a level higher after it.

    There nested places are saved, and inner ones are nested.
    """
    found, candidate = nested.found, nested.candidate
    levels = (found.places, found.nested_places, found.inner_places)
    positions = sorted(found.inner_places or found.nested_places)
    for count in _counts(len(positions)):
        end = positions[count - 1]
        changed: list[dict[int, frozenset[str]]] = [dict(found.places), {}, {}]
        for level, places in enumerate(levels[1:], 1):
            for place, names in places.items():
                changed[level if place <= end else level - 1][place] = names
        checkpoints = save_at(candidate.problem, *(dict(sorted(c.items())) for c in changed))
        yield from_checkpoints(candidate.problem, candidate.plan.modes, checkpoints).candidate


def _counts(total: int) -> list[int]:
    """In equal steps from above 0 to ``total``: how much of the change each plan has made."""
    steps = min(total, _BETWEEN)
    return [total * i // steps for i in range(1, steps + 1)]
