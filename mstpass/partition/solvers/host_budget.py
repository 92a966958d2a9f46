"""How much host memory would let a step meet a budget that no plan meets without it."""

from __future__ import annotations

import dataclasses

from mstpass.byte_sizes import bytes_text
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.host_memory import pinned_bytes
from mstpass.problem.problem import CutProblem
from mstpass.problem.saved_set import must_offload


def more_host_memory(problem: CutProblem, limit_bytes: int) -> str:
    """A sentence with the host budget that would do; empty if none would, or there is no host."""
    needed = least_host_bytes(problem, limit_bytes)
    if needed is None:
        return ""
    return f". With host_budget={bytes_text(needed)} or more, saved values can wait on the host"


def least_host_bytes(problem: CutProblem, limit_bytes: int) -> int | None:
    """The least host budget found with which a plan's simulated peak is within the limit.

    None if there is no such plan, or the step has no host memory beside it.
    """
    if problem.host is None or limit_bytes < 1:
        return None
    total = pinned_bytes(value.bytes for value in problem.values)
    host = dataclasses.replace(problem.host, budget_bytes=total)
    plan = peak_search(dataclasses.replace(problem, host=host), limit_bytes)
    if not simulate_plan(problem, plan).lowered_within(limit_bytes):
        return None
    closed = with_modes(problem, plan.modes)
    own = plan.offloaded - must_offload(closed)
    return pinned_bytes(value.bytes for value in closed.values if value.name in own)
