"""The plan within a budget that takes the least host memory.

Plans that keep little on the device are tried first, so that the host memory that is left to beat
is small from the beginning. A plan that cannot do with less takes one simulation.

``more_host_memory`` is how much of it would let a step meet a budget that no plan meets without.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstpass.byte_sizes import bytes_text
from mstpass.partition.solvers.candidate import Candidate
from mstpass.partition.solvers.checkpoint_plans import checkpoint_plans
from mstpass.partition.solvers.offload import offloaded_within
from mstpass.partition.solvers.sequence import sequence, to_checkpoints
from mstpass.problem.problem import CutProblem, pinned_bytes
from mstpass.problem.saved_set import must_offload

_HOSTS, _SMALLER = 12, 2**-0.5  # for which checkpoints are tried; from one to the next


def least_host_memory(problem: CutProblem, limit_bytes: int, host_bytes: int) -> Candidate | None:
    """The plan whose simulated peak is within the limit with the least pinned memory.

    All plans are compared, with each number of values on the host.

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
    if placed := problem.cached(checkpoint_plans):
        yield from reversed(placed.some())
        for number in range(_HOSTS):
            yield from reversed(placed.by_host(int(placed.stops_bytes * _SMALLER**number)))
        for form in placed.keeping:
            yield from reversed(list(to_checkpoints(form)))
    yield from reversed(list(sequence(problem, limit_bytes)))


def more_host_memory(problem: CutProblem, limit_bytes: int) -> str:
    """A sentence with the host budget that would do.

    Empty if none would, if there is no host, or if the problem's own host budget is as large: then
    something else than the simulated peak, such as Inductor's schedule, exceeds the budget.
    """
    needed = least_host_bytes(problem, limit_bytes)
    if needed is None or problem.host is None or needed <= problem.host.budget_bytes:
        return ""
    text = bytes_text(needed, round_up=True)
    return f". With host_budget={text} or more, saved values can wait on the host"


def least_host_bytes(problem: CutProblem, limit_bytes: int) -> int | None:
    """The least host budget with which ``peak_search`` finds a plan whose peak is within the limit.

    None if there is no such plan, or the step has no host memory beside it.
    """
    if problem.host is None or limit_bytes < 1:
        return None
    total = pinned_bytes(value.bytes for value in problem.values)
    found = least_host_memory(problem, limit_bytes, total)
    return None if found is None else own_pinned_bytes(found)
