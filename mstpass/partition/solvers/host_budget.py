"""How much host memory would let a step meet a budget that no plan meets without it."""

from __future__ import annotations

from mstpass.byte_sizes import bytes_text
from mstpass.partition.solvers.least_host_memory import least_host_memory, own_pinned_bytes
from mstpass.problem.host_memory import pinned_bytes
from mstpass.problem.problem import CutProblem


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
