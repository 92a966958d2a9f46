"""What a memory budget means for one step, in bytes of its simulated peak.

| ``memory_budget`` | bytes |
|---|---|
| ``"auto"``, ``"free"``, ``1.0`` | none: the plan that costs next to no time |
| ``0.0`` | 0: the lowest peak reachable |
| a float between | that far from the lowest peak to the free plan's |
| an int, ``"24GiB"`` | itself, less what a measured peak may exceed a simulated one by |
"""

from __future__ import annotations

from mstpass.graph.memory import StepMemory, Timeline
from mstpass.options import Options, parse_bytes
from mstpass.partition.modes import with_modes
from mstpass.partition.problem import CutProblem, Plan
from mstpass.partition.simulate import step_memory
from mstpass.partition.solvers import Solver

_SHOWN = 4
SPARE = 1.03  # what a measured peak may exceed a simulated one by


class BudgetError(RuntimeError):
    """No plan stays within the memory budget; the message names the lowest reachable peak."""


def solve_within(problem: CutProblem, options: Options, solve: Solver) -> Plan:
    """The solver's plan for the options' budget."""
    if not options.frees_memory_for_time:
        return solve(problem, None)
    budget = options.memory_budget
    size = parse_bytes(budget) if isinstance(budget, str) else budget
    assert size is not None
    if size == 0.0:
        return solve(problem, 0)
    if isinstance(size, int):
        return solve(problem, int(size / SPARE))
    highest = memory_of(problem, solve(problem, None)).peak_bytes
    lowest = memory_of(problem, solve(problem, 0)).peak_bytes
    return solve(problem, int(lowest + size * max(0, highest - lowest)))


def budget_bytes(options: Options) -> int | None:
    """The bytes that were asked for; None where the budget is relative or free."""
    budget = options.memory_budget
    if isinstance(budget, str):
        return parse_bytes(budget)
    return budget if isinstance(budget, int) and not isinstance(budget, bool) else None


def memory_of(problem: CutProblem, plan: Plan) -> StepMemory:
    return step_memory(with_modes(problem, plan.modes), plan.saved)


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
