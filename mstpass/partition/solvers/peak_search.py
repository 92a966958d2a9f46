"""The least extra time whose simulated peak is within a budget: the default solver.

A *sequence* of plans leads from the fastest one to the one of least memory
(landmark_sequence.py)::

    plan = the first of the sequence within the budget; the one of the lowest peak if none is
    plan = plan with the slack of the budget spent                              (spend_slack.py)

The sequence does not depend on the budget, but for smaller steps where it reaches the budget. None
of these has a lower peak than the next plan. So a smaller budget never gives a higher peak. For the
budget 0 only the landmarks of large graphs are compared, which takes less time.

Below the last landmark lie nested checkpoints (checkpoint_plans.py): the fastest plan of their
own sequence within the budget competes as well.

Attention is whole until a budget asks for its loops, which take time. *Families* of plans, without
such loops and with more and more of them, have each a sequence of their own (families.py). The
fastest plan within the budget is taken. Each family's plan of least memory competes as well, with
what the budget leaves spent on time.

Where saved values may wait on the host (``CutProblem.host``), plans of the sequence that exceed the
budget are tried with values offloaded (offload.py): the first one that is then within the budget,
and two behind it. So are checkpoints that are chosen for the host, with slow results and without.
If none of these is within the budget, all that there are get tried (least_host_memory.py). For the
least memory, the same plans are compared as without a host, and checkpoints that are chosen for it.

What Inductor alone saves, and what the step without loops does, compete as well: no budget takes
more time or a higher peak than a plan that is known in any case.

A family in which a single op needs more memory than the budget, or than another family's plan, is
not searched.

A peak is the one that is left once backward computes some cheap values twice
(memory/repeated_values.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from mstpass.partition.solvers.candidate import TIE, Candidate, MeasuredPlan, known_plans
from mstpass.partition.solvers.checkpoint_plans import CheckpointPlans
from mstpass.partition.solvers.families import families
from mstpass.partition.solvers.free_plan import free_plan
from mstpass.partition.solvers.landmark_sequence import Family
from mstpass.partition.solvers.least_host_memory import least_host_memory
from mstpass.partition.solvers.low_memory_plans import checkpointed_by_host, with_slow_results
from mstpass.partition.solvers.offload import (
    fits_with_host,
    offloaded_for_least_memory,
    offloaded_within,
    ways,
)
from mstpass.partition.solvers.spend_slack import slack_spent
from mstpass.problem.problem import CutProblem, Plan

_LOOKED_AT = 8  # plans of a sequence that are tried with values on the host, at first


def peak_search(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The fastest of the plans that the families have for the budget; see above."""
    if budget_bytes != 0:  # for the least memory nothing is known that takes no time
        free = problem.cached(free_plan)
        if budget_bytes is None or free.peak_bytes <= budget_bytes:
            return free.plan
    found: list[MeasuredPlan] = []
    if budget_bytes:
        found += (p for f in problem.cached(families) for p in _within(f, budget_bytes))
        found += (
            slack_spent(problem, c.plan, budget_bytes) for c in _checkpoints(problem, budget_bytes)
        )
        known = (c for c in problem.cached(known_plans) if c.lowered_within(budget_bytes))
        found += (MeasuredPlan(c.plan, _lowered(c), c.us) for c in known)
    least = problem.cached(_least)
    if found:
        if least.peak_bytes <= budget_bytes:
            found.append(slack_spent(problem, least.plan, budget_bytes))
        return min(found, key=_us).plan
    if not _uses_host(problem):
        return least.plan
    within = _within_by_host(problem, budget_bytes)
    return (within or _least_offloaded(problem, least)).plan


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


def _within_by_host(problem: CutProblem, budget_bytes: int) -> MeasuredPlan | None:
    """The plan within the budget that takes the least host memory; None if there is none."""
    assert problem.host is not None, "the host is known"
    if not budget_bytes:
        return None
    found = least_host_memory(problem, budget_bytes, problem.host.budget_bytes)
    return None if found is None else slack_spent(problem, found.plan, budget_bytes)


def _checkpoints_by_host(problem: CutProblem) -> Iterator[Candidate]:
    found = problem.cached(checkpointed_by_host)
    if found is not None:
        yield with_slow_results(found)
        yield found


def _least_offloaded(problem: CutProblem, least: MeasuredPlan) -> MeasuredPlan:
    """The fastest of the plans that have the lowest peak, this one among them.

    Peaks of which the simulation cannot tell which is lower count as equal.
    """
    plans = [least]
    placed = problem.cached(CheckpointPlans)
    nested = filter(None, (placed.least, *placed.by_host(_host_bytes(problem))[-1:]))
    by_host = filter(None, map(offloaded_for_least_memory, nested))
    plans += [slack_spent(problem, candidate.plan, 0) for candidate in by_host]
    for family in problem.cached(families):
        every = (*family.compared(), *_checkpoints_by_host(family.problem))
        found = [c for candidate in every if (c := offloaded_for_least_memory(candidate))]
        found.sort(key=lambda candidate: (candidate.peak_bytes, candidate.simulation.us))
        plans += [slack_spent(problem, candidate.plan, 0) for candidate in found[:1]]
    lowest = min(plan.peak_bytes for plan in plans)
    return min((p for p in plans if p.peak_bytes <= TIE * lowest), key=lambda plan: plan.us)


def _checkpoints(problem: CutProblem, budget_bytes: int) -> Iterator[Candidate]:
    """The fastest plans with checkpoints within a budget: without values on the host, and with."""
    plans = problem.cached(CheckpointPlans)
    if fastest := plans.within(budget_bytes):
        yield fastest
    if _uses_host(problem):
        tried = (plans.some(), plans.by_host(_host_bytes(problem)))
        every = (found for some in tried for found in _with_offloading(some, budget_bytes))
        yield from sorted(every, key=lambda plan: plan.us)[:1]


# ---- without -----------------------------------------------------------------------------------
def _within(family: Family, budget_bytes: int) -> list[MeasuredPlan]:
    """The plans of a family that are within the budget, with its slack spent."""
    if family.least_bytes > budget_bytes:
        return []
    plans = [candidate.plan for candidate in _firsts(family, budget_bytes)]
    if family.lowest.simulation.lowered_peak_bytes <= budget_bytes:
        plans.append(family.least.plan)
    return [slack_spent(family.problem, plan, budget_bytes) for plan in plans]


def _firsts(family: Family, budget_bytes: int) -> list[Candidate]:
    """The first plan of the sequence that is within the budget, and the fastest with values on the
    host, if there are any."""
    found: list[Candidate] = []
    tried: list[Candidate] = []
    for candidate in family.sequence(budget_bytes):
        if candidate.lowered_within(budget_bytes):
            found.append(candidate)
            break
        tried.append(candidate)
    if _uses_host(family.problem):
        by_host = (offloaded_within(c, budget_bytes) for c in _checkpoints_by_host(family.problem))
        every = [*_with_offloading(tried, budget_bytes), *(c for c in by_host if c is not None)]
        found += sorted(every, key=lambda candidate: candidate.simulation.us)[:1]
    return found


def _least(problem: CutProblem) -> MeasuredPlan:
    """The plan of least memory of all families, without values on the host.

    Of families whose peaks count as equal, the fastest.
    """
    first, *others = problem.cached(families)
    lowest = first.lowest  # of equal peaks that of the fewest loops, which take time
    for family in others:
        if family.least_compared_bytes < _lowered(lowest):
            lowest = min(lowest, family.lowest, key=_lowered)
    for known in problem.cached(known_plans):
        if known.simulation.is_lowered_below(_lowered(lowest)):
            lowest = known
    nested = problem.cached(CheckpointPlans).least
    if nested is not None and nested.lowered_within(int(_lowered(lowest) / TIE)):
        lowest = nested
    elif faster := problem.cached(CheckpointPlans).within(_lowered(lowest)):
        lowest = min(lowest, faster, key=lambda candidate: candidate.us)
    equal_bytes = int(TIE * _lowered(lowest))
    candidates = (f for f in (first, *others) if f.least_compared_bytes <= equal_bytes)
    equal = [family.least for family in candidates if _lowered(family.lowest) <= equal_bytes]
    return min((slack_spent(problem, lowest.plan, 0), *equal), key=_us)


def _lowered(candidate: Candidate) -> int:
    return candidate.simulation.lowered_peak_bytes


def _us(plan: MeasuredPlan) -> float:
    return plan.us
