"""What a memory budget means for one step, in bytes of its simulated peak.

| ``memory_budget`` | bytes |
|---|---|
| ``"auto"``, ``"free"``, ``1.0`` | none: the plan that costs next to no time |
| ``0.0`` | 0: the lowest peak reachable |
| a float between | that far from the lowest peak to the free plan's |
| an int, ``"24GiB"`` | itself, less what a measured peak may exceed a simulated one by |
"""

from __future__ import annotations

from mstpass.byte_sizes import parse_bytes
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.options import Options
from mstpass.plans import Outcome
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.solver_registry import Solver

_SHOWN = 4
SPARE = 1.03  # what a measured peak may exceed a simulated one by


class BudgetError(RuntimeError):
    """No plan stays within the memory budget; the message names the lowest reachable peak."""


def solve_within(
    problem: CutProblem, options: Options, solve: Solver, limit_bytes: int | None = None
) -> Plan:
    """The solver's plan for the options' budget; ``limit_bytes`` is that of one in bytes."""
    if not options.frees_memory_for_time:
        return solve(problem, None)
    if limit_bytes is not None:
        return solve(problem, limit_bytes)
    share = options.memory_budget
    assert isinstance(share, float)
    if share == 0.0:
        return solve(problem, 0)
    highest = memory_of(problem, solve(problem, None)).peak_bytes
    lowest = memory_of(problem, solve(problem, 0)).peak_bytes
    return solve(problem, int(lowest + share * max(0, highest - lowest)))


def simulated_limit_bytes(options: Options) -> int | None:
    """What the simulated peak must keep to under a budget in bytes; None under any other."""
    budget = budget_bytes(options)
    return None if budget is None else int(budget / SPARE)


def budget_bytes(options: Options) -> int | None:
    """The bytes that were asked for; None where the budget is relative or free."""
    budget = options.memory_budget
    if isinstance(budget, str):
        return parse_bytes(budget)
    return budget if isinstance(budget, int) and not isinstance(budget, bool) else None


def tighter_limit_bytes(outcome: Outcome, options: Options, last: bool) -> int | None:
    """What the simulated peak must keep to for Inductor's schedule to stay within the budget.

    Args:
        last: there is one attempt left, which is for the lowest peak, a limit of 0.

    Returns:
        None where the schedule does, where it is not known, and where no plan needs less.
    """
    scheduled, limit = outcome.scheduled_peak_bytes, outcome.limit_bytes
    budget = budget_bytes(options)
    if not _is_over(outcome, options) or scheduled is None or budget is None:
        return None
    if not limit or outcome.peak_bytes is None or outcome.peak_bytes > budget:
        return None
    if last or outcome.peak_bytes > limit:
        return 0  # that of ``memory_budget=0.0``
    return int(outcome.peak_bytes * budget / scheduled)


def over_budget(outcome: Outcome, options: Options) -> str:
    """Why a plan within the budget is over it when Inductor has scheduled it; "" if it is not."""
    scheduled, budget = outcome.scheduled_peak_bytes, budget_bytes(options)
    if budget is None or scheduled is None or not _is_over(outcome, options):
        return ""
    if outcome.peak_bytes is not None and outcome.peak_bytes > budget:
        return ""  # the planner said so itself
    return (
        f"memory_budget={_mib(budget)}: the lowest peak found is {_mib(scheduled)}, by Inductor's "
        "schedule. Ask for at least that much, or shorten the batch"
    )


def _is_over(outcome: Outcome, options: Options) -> bool:
    scheduled, budget = outcome.scheduled_peak_bytes, budget_bytes(options)
    return scheduled is not None and budget is not None and scheduled > budget


def memory_of(problem: CutProblem, plan: Plan) -> StepMemory:
    return simulate_plan(problem, plan).memory


def infeasible(budget: int, memory: StepMemory) -> str:
    """Why a budget cannot be met: the lowest peak found, and what holds it up."""
    phase = "forward" if memory.peak is memory.forward else "backward"
    return (
        f"memory_budget={_mib(budget)}: the lowest peak found is {_mib(memory.peak_bytes)}, in the "
        f"{phase} at {memory.peak.peak.node}; alive there: {_alive(memory.peak)}. Ask for at least "
        "that much, or shorten the batch"
    )


def _alive(timeline: Timeline) -> str:
    largest = timeline.alive[:_SHOWN]
    shown = ", ".join(f"{m.node} {_mib(m.bytes)}" for m in largest)
    rest = sum(m.bytes for m in timeline.alive[_SHOWN:])
    return f"{shown} and {_mib(rest)} in {len(timeline.alive) - len(largest)} others"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}MiB"
