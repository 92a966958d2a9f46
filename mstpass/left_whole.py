"""Why a plan leaves regions whole that could have loops, with the numbers that decide it.

A region stays whole if its loops would raise the simulated peak, by what they keep (sums over
chunks in float32, gradients that a fused loop holds until the backward); if they would lower it,
and take more time than the free plan may, or than the budget needs; or if the peak lies where the
region is not. Each is told by a simulation: of the plan in which the region has loops, and of the
bytes that are alive while the region runs. Regions that are alike share one simulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import networkx as nx

from mstpass.byte_sizes import bytes_text
from mstpass.graph import advice
from mstpass.limit import Limit
from mstpass.loops.candidate_modes import RegionCandidates
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.candidate import (
    TIE,
    Candidate,
    baseline,
    fewest_saved_bytes,
)
from mstpass.partition.solvers.choose_modes import least_memory_mode, least_memory_modes
from mstpass.plans import ChunkPlan
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Plan

_TOO_LONG = "take too long without a budget"
_MOST_VALUES = 20_000  # of all simulations together: they would take seconds


def reasons_left_whole(
    problem: CutProblem, plan: Plan, left: Sequence[RegionCandidates], limit: Limit
) -> list[str]:
    """The reason for each region, in order.

    Args:
        left: regions that have no loops in the plan.
        limit: what the plan may take.
    """
    if not left:
        return []
    simulation = Candidate(with_modes(problem, plan.modes), plan).simulation
    whole = functools.cache(lambda: fewest_saved_bytes(problem, plan.modes).peak_bytes)
    alike: dict[tuple[object, ...], list[RegionCandidates]] = {}
    for candidate in left:
        alike.setdefault(_kind(candidate), []).append(candidate)
    room = _MOST_VALUES
    found: dict[str, str] = {}
    for group in alike.values():
        room -= len(problem.values)
        reason = _by_numbers(problem, plan, group[0], whole, limit) if room > 0 else ""
        reason = reason or _elsewhere(simulation, group, limit)
        found |= {candidate.region: reason for candidate in group}
    reasons = [found[candidate.region] for candidate in left]
    if room < 0 or not limit.is_free or all(_TOO_LONG in reason for reason in reasons):
        return reasons
    more = _under_a_budget(problem, plan, simulation.peak_bytes)
    stays = lambda reason: not more or _TOO_LONG in reason
    return [reason if stays(reason) else advice.under_a_budget(reason, more) for reason in reasons]


def _under_a_budget(problem: CutProblem, plan: Plan, peak_bytes: int) -> str:
    """What all regions together would gain from loops that take more time; "" if nothing."""
    modes = {**plan.modes, **least_memory_modes(problem)}
    try:
        least_bytes = fewest_saved_bytes(problem, modes).peak_bytes
    except (Cycle, nx.NetworkXUnbounded):
        return ""
    lower = f"chunks in all such parts lower it, to {bytes_text(least_bytes)} or less"
    return lower if TIE * least_bytes < peak_bytes else ""


def _kind(candidate: RegionCandidates) -> tuple[object, ...]:
    modes = (
        (mode, p.kind, p.bytes_before, p.chunk_tokens, p.num_chunks) for mode, p in candidate.plans
    )
    return (candidate.optional, candidate.whole_first, *modes)


def _by_numbers(
    problem: CutProblem,
    plan: Plan,
    candidate: RegionCandidates,
    whole: Callable[[], int],
    limit: Limit,
) -> str:
    """The reason, if the peak or the time of the region's loops is it; else an empty text.

    The region whole, as in the plan, and in its mode of least memory: both save the fewest bytes.

    Args:
        whole: the peak of the first.
    """
    region = next((r for r in problem.regions if r.region == candidate.region), None)
    if region is None:  # of the graph as it was traced, the problem has no regions
        return ""
    mode = least_memory_mode(region).name
    loops = candidate.plan_in(mode)
    assert loops is not None, "least memory is that of loops"
    try:
        whole_bytes = whole()
        chunked = fewest_saved_bytes(problem, {**plan.modes, candidate.region: mode})
    except (Cycle, nx.NetworkXUnbounded):
        return ""
    chunked_bytes, text = chunked.peak_bytes, _loops_text(loops)
    peaks = f"from {bytes_text(whole_bytes)} to {bytes_text(chunked_bytes)}"
    if chunked_bytes > TIE * whole_bytes:
        return advice.MORE_ROWS_LOWER(
            f"{text} here would raise the step's peak, {peaks}, by the sums and gradients that "
            "their loops keep"
        )
    if TIE * chunked_bytes >= whole_bytes or limit.is_least:
        return ""
    lowered = f"{text} here would lower the step's peak, {peaks}"
    if not limit.is_free:
        return advice.LOWER_BUDGET(f"{lowered}, but the budget is met without them")
    before_us = problem.cached(baseline).us
    extra_time = chunked.us / before_us - 1 if before_us else 0.0
    if extra_time <= problem.free_overhead:
        return ""
    return advice.SET_BUDGET(
        f"{lowered}, but {_TOO_LONG}: the step would take "
        f"{extra_time:.1%} more time, and free_overhead allows {problem.free_overhead:.1%}"
    )


def _loops_text(plan: ChunkPlan) -> str:
    """The chunks of a plan's loops: ``"4 chunks of tokens and 13 of features"``."""
    cuts = dict.fromkeys((loop.cut.axis, loop.cut.count) for loop in plan.loops)
    first, *others = ((str(count), f"of {axis}") for axis, count in cuts)
    return " and ".join([" chunks ".join(first), *map(" ".join, others)])


def _elsewhere(simulation: StepSimulation, group: Sequence[RegionCandidates], limit: Limit) -> str:
    """The reason of a region that does not make the peak."""
    if group[0].whole_first:
        reason = "chunks without recomputation save no memory, and the plan needs none here"
        return advice.LOWER_BUDGET(reason)
    memory = simulation.memory
    phase = "backward" if memory.peak is memory.backward else "forward"
    bytes_at = simulation.bytes_at()
    members = (name for c in group for name in c.members)
    here = max((bytes_at.get(name, 0) for name in members), default=0)
    peak = memory.peak.peak
    told = f"{bytes_text(peak.bytes)} at {peak.node} in {phase}, at most {bytes_text(here)} here"
    if here >= peak.bytes:  # it runs where the peak is, which other values make
        told = f"{bytes_text(peak.bytes)} at {peak.node} in {phase}, with chunks here as well"
    ending = ", at the least memory that was found" if limit.is_least else ""
    fix = advice.LEAST_BUDGET if limit.is_least else advice.LOWER_BUDGET
    return fix(
        f"the step's peak lies elsewhere ({told}), so chunks here would not lower it{ending}"
    )
