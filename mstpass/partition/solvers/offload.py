"""Have saved values wait on the host, as few as bring a plan's peak within a limit.

The values that forward computes first are offloaded first: backward needs them last, so they are
idle for the longest time, and their copies have most to run beside. How many there are is found by
bisection on the simulated peak. If they are too large to be in memory whole, loops of the backward
copy their rows (memory/host_copies.py), which takes time that nothing runs beside: of the first
ones again, because most gradients are in memory when backward comes to these.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

from mstpass.partition.solvers.candidate import Candidate
from mstpass.problem.problem import MAY_OFFLOAD, pinned_bytes


def all_offloaded(
    candidate: Candidate, host_bytes: int | None = None, by_chunk: bool = False
) -> Candidate:
    """The plan with as many values on the host as may be there.

    Args:
        host_bytes: the host's budget, here and below (None: the problem's own).
        by_chunk: loops copy rows of them, where they can; here and below.
    """
    names = _offloadable(candidate, host_bytes)
    return _with_first(candidate, names, len(names), len(names) if by_chunk else 0)


def fits_with_host(
    candidate: Candidate, limit_bytes: int, host_bytes: int | None = None, by_chunk: bool = False
) -> bool:
    """Whether the plan is within a limit with as many values on the host as it may have there."""
    every = all_offloaded(candidate, host_bytes, by_chunk)
    return bool(every.plan.offloaded) and every.lowered_within(limit_bytes)


def offloaded_within(
    candidate: Candidate, limit_bytes: int, host_bytes: int | None = None
) -> Candidate | None:
    """The plan with the fewest values on the host that is within a limit; None if none is.

    Loops copy rows of as few of them as that takes: of none, if that is enough.
    """
    for by_chunk in ways(candidate):
        if fits_with_host(candidate, limit_bytes, host_bytes, by_chunk):
            names = _offloadable(candidate, host_bytes)
            return _fewest(candidate, names, by_chunk, lambda c: c.lowered_within(limit_bytes))
    return None


def offloaded_for_least_memory(candidate: Candidate) -> Candidate | None:
    """The plan with the fewest values on the host that lower its peak as far as all of them do."""
    by_chunk = min(
        ways(candidate), key=lambda way: all_offloaded(candidate, by_chunk=way).peak_bytes
    )
    every = all_offloaded(candidate, by_chunk=by_chunk)
    if every.peak_bytes >= candidate.peak_bytes:
        return None
    names = _offloadable(candidate)
    return _fewest(candidate, names, by_chunk, lambda c: c.peak_bytes <= every.peak_bytes)


def ways(candidate: Candidate) -> tuple[bool, ...]:
    """How values may come back: whole, and if any loop can, by chunk."""
    ops = (*candidate.problem.values, *candidate.problem.backward)
    return (False, True) if any(op.in_rows for op in ops) else (False,)


def _fewest(
    candidate: Candidate, names: list[str], by_chunk: bool, accepted: Callable[[Candidate], bool]
) -> Candidate:
    """The plan with the fewest of the first values on the host that is accepted; all of them are.

    More values on the host hardly ever raise a peak, so that a bisection finds it. Nor do more
    values of which loops copy rows.
    """

    def offloaded(count: int, rows: int) -> Candidate:
        return _with_first(candidate, names, count, rows)

    if not by_chunk:
        return offloaded(_least(len(names), lambda count: accepted(offloaded(count, 0))), 0)
    count = _least(len(names), lambda count: accepted(offloaded(count, count)))
    return offloaded(count, _least(count, lambda rows: accepted(offloaded(count, rows))))


def _least(most: int, accepted: Callable[[int], bool]) -> int:
    """The least number that is accepted, up to the given one, which is."""
    return bisect.bisect_left(range(most), True, key=accepted)


def _with_first(candidate: Candidate, names: list[str], count: int, rows: int = 0) -> Candidate:
    """The plan with so many values on the host, and of the first ones only rows copied back."""
    offloaded = candidate.plan.offloaded | frozenset(names[:count])
    by_chunk = candidate.plan.by_chunk | frozenset(names[:rows])
    plan = dataclasses.replace(candidate.plan, offloaded=offloaded, by_chunk=by_chunk)
    return Candidate(candidate.problem, plan)


def _offloadable(candidate: Candidate, host_bytes: int | None = None) -> list[str]:
    """The saved values that may be offloaded, in order, as many as the host's budget holds."""
    problem, saved = candidate.problem, candidate.plan.saved
    if host_bytes is None:
        host_bytes = 0 if problem.host is None else problem.host.budget_bytes
    found: list[str] = []
    used_bytes = 0
    for value in problem.values:
        if value.name in saved and value.offload == MAY_OFFLOAD:
            used_bytes += pinned_bytes([value.bytes])
            if used_bytes > host_bytes:
                break
            found.append(value.name)
    return found
