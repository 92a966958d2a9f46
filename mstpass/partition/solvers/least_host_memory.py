"""The plan within a budget that takes the least host memory.

Plans that keep little on the device are tried first, so that the host memory that is left to beat
is small from the beginning. A plan that cannot do with less takes one simulation.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstpass.partition.solvers.candidate import Candidate
from mstpass.partition.solvers.checkpoint_plans import CheckpointPlans
from mstpass.partition.solvers.families import families
from mstpass.partition.solvers.low_memory_plans import every_checkpointed
from mstpass.partition.solvers.offload import offloaded_within
from mstpass.problem.host_memory import pinned_bytes
from mstpass.problem.problem import CutProblem
from mstpass.problem.saved_set import must_offload

_HOSTS, _SMALLER = 12, 2**-0.5  # for which checkpoints are tried; from one to the next


def least_host_memory(problem: CutProblem, limit_bytes: int, host_bytes: int) -> Candidate | None:
    """The plan whose simulated peak is within the limit with the least pinned memory.

    All plans of all families are compared, with each number of values on the host.

    Args:
        host_bytes: pinned memory that the plan may take; the problem's own budget does not count.

    Returns:
        None if no plan is within the limit.
    """
    best: Candidate | None = None
    for candidate in _every_plan(problem, limit_bytes):
        found = offloaded_within(candidate, limit_bytes, host_bytes)
        if found is not None and (pinned := own_pinned_bytes(found)):
            best, host_bytes = found, pinned - 1
    return best


def own_pinned_bytes(candidate: Candidate) -> int:
    """Pinned memory that a plan takes, besides what checkpoint policies offload."""
    own = candidate.plan.offloaded - must_offload(candidate.problem)
    return pinned_bytes(value.bytes for value in candidate.problem.values if value.name in own)


def _every_plan(problem: CutProblem, limit_bytes: int) -> Iterator[Candidate]:
    placed = problem.cached(CheckpointPlans)
    yield from reversed(placed.some())
    for number in range(_HOSTS):
        yield from reversed(placed.by_host(int(placed.stops_bytes * _SMALLER**number)))
    last_first = tuple(reversed(problem.cached(families)))  # the last ones have the lowest peaks
    for family in last_first:
        yield from family.landmarks()
    for family in last_first:
        yield from every_checkpointed(family.problem)
    for family in last_first:
        yield from family.sequence(limit_bytes)
