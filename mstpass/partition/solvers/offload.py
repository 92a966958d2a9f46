"""Have saved values wait on the host, as few as bring a plan's peak within a limit.

The values that forward computes first are offloaded first: backward needs them last, so they are
idle for the longest time, and their copies have most to run beside. How many there are is found by
bisection on the simulated peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mstpass.partition.solvers.candidate import Candidate
from mstpass.problem.host_memory import pinned_bytes
from mstpass.problem.problem import MAY_OFFLOAD


def all_offloaded(candidate: Candidate, host_bytes: int | None = None) -> Candidate:
    """The plan with as many values on the host as may be there.

    Args:
        host_bytes: the host's budget, here and below (None: the problem's own).
    """
    names = _offloadable(candidate, host_bytes)
    return _with_first(candidate, names, len(names))


def fits_with_host(candidate: Candidate, limit_bytes: int, host_bytes: int | None = None) -> bool:
    """Whether the plan is within a limit with as many values on the host as it may have there."""
    every = all_offloaded(candidate, host_bytes)
    return bool(every.plan.offloaded) and _is_within(every, limit_bytes)


def offloaded_within(
    candidate: Candidate, limit_bytes: int, host_bytes: int | None = None
) -> Candidate | None:
    """The plan with the fewest values on the host that is within a limit; None if none is."""
    if not fits_with_host(candidate, limit_bytes, host_bytes):
        return None
    names = _offloadable(candidate, host_bytes)
    return _fewest(candidate, names, lambda found: _is_within(found, limit_bytes))


def offloaded_for_least_memory(candidate: Candidate) -> Candidate | None:
    """The plan with the fewest values on the host that lower its peak as far as all of them do."""
    every = all_offloaded(candidate)
    if every.peak_bytes >= candidate.peak_bytes:
        return None
    names = _offloadable(candidate)
    return _fewest(candidate, names, lambda found: found.peak_bytes <= every.peak_bytes)


def _is_within(candidate: Candidate, limit_bytes: int) -> bool:
    within = candidate.saved_bytes <= limit_bytes
    return within and candidate.simulation.lowered_within(limit_bytes)


def _fewest(
    candidate: Candidate, names: list[str], accepted: Callable[[Candidate], bool]
) -> Candidate:
    """The plan with the fewest of the first values on the host that is accepted; all of them are.

    More values on the host hardly ever raise a peak, so that a bisection finds it.
    """
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if accepted(_with_first(candidate, names, middle)):
            high = middle
        else:
            low = middle + 1
    return _with_first(candidate, names, high)


def _with_first(candidate: Candidate, names: list[str], count: int) -> Candidate:
    offloaded = candidate.plan.offloaded | frozenset(names[:count])
    plan = dataclasses.replace(candidate.plan, offloaded=offloaded)
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
