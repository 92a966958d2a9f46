"""The least extra time whose simulated peak is within a budget: the default solver.

One set of plans leads from the fastest to the one of least memory. Each answer is the fastest plan
of the set that is within the budget, with the slack of the budget spent (spend_slack.py)::

    free                        savings that cost next to no time; then all of them (free_plan.py)
    region by region            the mode of the fewest bytes, with loops that take time
    least-memory loops          every region in the mode that keeps fewest bytes, in short chunks
    checkpoints                 what is alive at places is saved     (checkpoint_plans.py)
    step by Inductor alone, and the step without loops: known in any case

The first three are a *sequence*, of which the first plan within the budget is taken. It depends on
the budget in one way: a step that changes several regions and reaches the budget is taken region by
region. None of these has a lower peak than the next plan. So a smaller budget never gives a higher
peak. No budget takes more time or a higher peak than a plan that is known in any case.

Where saved values may wait on the host (``CutProblem.host``), plans that exceed the budget are
tried with values offloaded (offload.py): the first one that is then within the budget, and two
behind it. If none is, all plans get tried (least_host_memory.py). For the least memory, the same
plans are compared as without a host, and checkpoints that are chosen for it.

A peak is the one that is left once backward computes some cheap values twice
(memory/repeated_values.py).
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Iterator, Sequence

from mstpass.partition.solvers.candidate import (
    TIE,
    Candidate,
    known_plans,
    least_memory_loops,
)
from mstpass.partition.solvers.checkpoint_plans import checkpoint_plans
from mstpass.partition.solvers.free_plan import every_saving, free_plan
from mstpass.partition.solvers.least_host_memory import least_host_memory
from mstpass.partition.solvers.offload import (
    fits_with_host,
    offloaded_for_least_memory,
    offloaded_within,
    ways,
)
from mstpass.partition.solvers.sequence import sequence, to_checkpoints, with_checkpoints
from mstpass.partition.solvers.spend_slack import slack_spent
from mstpass.problem.problem import CutProblem, Plan

_FEW_OPS = 500  # a hundred simulations of so many take half a second
_SOME_OPS = 1_500  # and of so many some take little time: estimates of checkpoints miss most there
_US = operator.attrgetter("us")
_LOOKED_AT = 8  # plans of a sequence that are tried with values on the host, at first


def peak_search(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The fastest of the plans for the budget; see above."""
    if budget_bytes != 0:  # for the least memory nothing is known that takes no time
        free = problem.cached(free_plan)
        if budget_bytes is None or free.peak_bytes <= budget_bytes:
            return free.plan
    found: list[Candidate] = []
    least = problem.cached(_least)
    if budget_bytes:
        within = [*_firsts(problem, budget_bytes), *_checkpoints(problem, budget_bytes)]
        if least.lowered_peak_bytes <= budget_bytes:
            within.append(least)
        found += (slack_spent(problem, c, budget_bytes) for c in within)
        found += (c for c in problem.cached(known_plans) if c.lowered_within(budget_bytes))
    if found:
        return min(found, key=_US).plan
    if not _uses_host(problem):
        return slack_spent(problem, least, 0).plan
    by_host = _within_by_host(problem, budget_bytes)
    return (by_host or _least_offloaded(problem, least)).plan


# ---- without values on the host ----------------------------------------------------------------
def _firsts(problem: CutProblem, budget_bytes: int) -> Iterator[Candidate]:
    """The first plan of each sequence that is within the budget, and the fastest with values on the
    host, if there are any."""
    for plans in _sequences(problem, budget_bytes):
        tried: list[Candidate] = []
        for candidate in plans:
            if candidate.lowered_within(budget_bytes):
                yield candidate
                break
            tried.append(candidate)
        if _uses_host(problem):
            yield from _fastest(_with_offloading(tried, budget_bytes))


def _sequences(
    problem: CutProblem, budget_bytes: int | None = None
) -> Iterator[Iterator[Candidate]]:
    yield sequence(problem, budget_bytes)
    if placed := problem.cached(checkpoint_plans):
        yield from map(to_checkpoints, placed.keeping)


def _checkpoints(problem: CutProblem, budget_bytes: int) -> Iterator[Candidate]:
    """The fastest plans with checkpoints within a budget: without values on the host, and with."""
    plans = problem.cached(checkpoint_plans)
    if plans is None:
        return
    if fastest := plans.within(budget_bytes):
        yield fastest
    if _uses_host(problem):
        tried = (plans.some(), plans.by_host(_host_bytes(problem)))
        yield from _fastest(f for some in tried for f in _with_offloading(some, budget_bytes))


def _fastest(plans: Iterable[Candidate]) -> list[Candidate]:
    """The plan that takes the least time, if there is any."""
    return sorted(plans, key=_US)[:1]


def _least(problem: CutProblem) -> Candidate:
    """The plan of least memory, without values on the host; of peaks that count as equal the
    fastest."""
    placed = problem.cached(checkpoint_plans)
    number = len(problem.values) + len(problem.backward)
    plans = [problem.cached(least_memory_loops), *problem.cached(known_plans)]
    if placed is None or number <= _SOME_OPS:
        plans.append(problem.cached(every_saving))
    if placed is not None:
        plans += filter(None, (placed.lowest(levels=0), placed.least))
    if number <= _FEW_OPS:
        plans += (plan for one in _sequences(problem) for plan in one)
    elif placed is not None and number <= _SOME_OPS:
        plans += map(with_checkpoints, placed.keeping)
    lowest, *others = sorted(plans, key=lambda candidate: candidate.peak_bytes)
    for other in others:
        if other.simulation.is_lowered_below(lowest.lowered_peak_bytes):
            lowest = other
    equal_bytes = int(TIE * lowest.lowered_peak_bytes)
    equal = [plan for plan in plans if plan is lowest or plan.lowered_within(equal_bytes)]
    if placed is not None and (faster := placed.within(lowest.lowered_peak_bytes)):
        equal.append(faster)
    return min(equal, key=_US)


# ---- with values on the host -------------------------------------------------------------------
def _uses_host(problem: CutProblem) -> bool:
    return _host_bytes(problem) > 0


def _host_bytes(problem: CutProblem) -> int:
    return 0 if problem.host is None else problem.host.budget_bytes


def _with_offloading(tried: Sequence[Candidate], budget_bytes: int) -> Iterator[Candidate]:
    """Plans of a sequence that are within the budget with values offloaded.

    Earlier plans are faster, but need more copies, for which the device may have to wait; later
    ones may save too little to be helped. So some of all are looked at, the first and the last
    among them, and of the first one that is within the budget those just before it. That is done
    once for values that come back whole, and once for those of which loops copy rows.
    """
    last = len(tried) - 1
    looked_at = sorted({last * i // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)})
    seen: set[int] = set()
    for by_chunk in ways(tried[-1]) if tried else ():

        def fits(i: int, by_chunk: bool = by_chunk) -> bool:
            return fits_with_host(tried[i], budget_bytes, by_chunk=by_chunk)

        within = list(filter(fits, looked_at))
        if not within:
            continue
        low = max((i + 1 for i in looked_at if i < within[0]), default=0)
        first = bisect.bisect_left(range(within[0]), True, lo=low, key=fits)
        for i in sorted({first, within[len(within) // 2], within[-1]} - seen):
            seen.add(i)
            if found := offloaded_within(tried[i], budget_bytes):
                yield found


def _within_by_host(problem: CutProblem, budget_bytes: int) -> Candidate | None:
    """The plan within the budget that takes the least host memory; None if there is none."""
    assert problem.host is not None, "the host is known"
    if not budget_bytes:
        return None
    found = least_host_memory(problem, budget_bytes, problem.host.budget_bytes)
    return None if found is None else slack_spent(problem, found, budget_bytes)


def _least_offloaded(problem: CutProblem, least: Candidate) -> Candidate:
    """The fastest of the plans that have the lowest peak, this one among them.

    Peaks of which the simulation cannot tell which is lower count as equal.
    """
    every = [plan for one in _sequences(problem) for plan in one]
    if placed := problem.cached(checkpoint_plans):
        every += filter(None, (placed.least, *placed.by_host(_host_bytes(problem))[-1:]))
    found = filter(None, map(offloaded_for_least_memory, every))
    by_host = sorted(found, key=lambda candidate: (candidate.peak_bytes, candidate.us))[:2]
    plans = [slack_spent(problem, candidate, 0) for candidate in (least, *by_host)]
    limit_bytes = TIE * min(plan.lowered_peak_bytes for plan in plans)
    return min((p for p in plans if p.lowered_peak_bytes <= limit_bytes), key=_US)
