"""What a memory budget means for one step: a limit on the bytes of its simulated peak.

| ``memory_budget`` | limit on the simulated peak |
|---|---|
| ``"auto"``, ``"free"``, ``1.0`` | none: the plan that costs next to no time |
| ``0.0`` | 0: no plan meets it, so solvers return the lowest peak they find |
| a float s between | lowest peak + s (free plan's peak - lowest peak) |
| an int, ``"24GiB"`` | budget / ``MEASURED_OVER_SIMULATED`` |

On a CUDA device ``"auto"`` is ``"free"`` if that plan ``fits``, else a number of bytes
(memory/device_budget.py).

A budget in bytes is checked twice more. If the rewritten graphs, or Inductor's schedule of them,
exceed the budget, the step is planned again with a lower limit. If no plan meets the budget, the
user is told the lowest peak found.
"""

from __future__ import annotations

from mstpass.byte_sizes import bytes_text, parse_bytes
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.options import Options
from mstpass.plans import Outcome
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.solver_registry import Solver

MEASURED_OVER_SIMULATED = 1.03  # the most that a measured peak exceeds the simulated one by
_SHOWN = 4  # values that a message names
_ADVICE = "Raise memory_budget to at least that much, or use a smaller batch or shorter sequences"


class BudgetError(RuntimeError):
    """No plan stays within the memory budget; the message names the lowest peak found."""


def limit_of(
    problem: CutProblem, options: Options, solve: Solver, limit_bytes: int | None = None
) -> int | None:
    """The limit on the simulated peak that the options ask a solver for; None: no limit.

    Args:
        limit_bytes: the limit, where the budget is in bytes.
    """
    if not options.frees_memory_for_time:
        return None
    if limit_bytes is not None:
        return limit_bytes
    share = options.memory_budget
    assert isinstance(share, float)
    if share == 0.0:
        return 0
    highest = memory_of(problem, solve(problem, None)).peak_bytes
    lowest = simulate_plan(problem, solve(problem, 0)).lowered_peak_bytes
    return int(lowest + share * max(0, highest - lowest))


def simulated_limit_bytes(options: Options) -> int | None:
    """The limit on the simulated peak for a budget in bytes; None for any other budget."""
    budget = budget_bytes(options)
    return None if budget is None else simulated_limit(budget)


def simulated_limit(measured_bytes: int) -> int:
    """The limit on a simulated peak for the measured one to stay within ``measured_bytes``."""
    return int(measured_bytes / MEASURED_OVER_SIMULATED)


def budget_bytes(options: Options) -> int | None:
    """The budget if it is in bytes; None if it is relative or free."""
    budget = options.memory_budget
    if isinstance(budget, str):
        return parse_bytes(budget)
    return budget if isinstance(budget, int) and not isinstance(budget, bool) else None


def fits(outcome: Outcome, available_bytes: int) -> bool:
    """Whether a plan stays within so many measured bytes; one of unknown peak is taken to."""
    if outcome.scheduled_peak_bytes is not None:
        return outcome.scheduled_peak_bytes <= available_bytes
    return outcome.peak_bytes is None or outcome.peak_bytes <= simulated_limit(available_bytes)


def tighter_limit_bytes(outcome: Outcome, options: Options, last: bool) -> int | None:
    """A lower limit on the simulated peak, if Inductor's schedule exceeds the budget.

    The limit is scaled by what the schedule exceeds the budget by.

    Args:
        last: only one attempt is left; it asks for the lowest peak.

    Returns:
        None if the schedule stays within the budget or is not known, and if the plan at hand has
        the lowest peak already.
    """
    scheduled, limit = outcome.scheduled_peak_bytes, outcome.limit_bytes
    budget = budget_bytes(options)
    if not _is_over(outcome, options) or scheduled is None or budget is None:
        return None
    if not limit or outcome.peak_bytes is None or outcome.peak_bytes > budget:
        return None
    if last or outcome.peak_bytes > limit:
        return 0  # the lowest peak, as for ``memory_budget=0.0``
    return int(outcome.peak_bytes * budget / scheduled)


def over_budget(outcome: Outcome, options: Options) -> str:
    """The message that Inductor's schedule of a plan exceeds the budget; "" if it does not."""
    scheduled, budget = outcome.scheduled_peak_bytes, budget_bytes(options)
    if budget is None or scheduled is None or not _is_over(outcome, options):
        return ""
    if outcome.peak_bytes is not None and outcome.peak_bytes > budget:
        return ""  # ``infeasible`` has said so
    return (
        f"memory_budget={bytes_text(budget)} cannot be met: the lowest peak found is "
        f"{bytes_text(scheduled)}, by Inductor's schedule. {_cause(outcome)}{_ADVICE}"
    )


def _cause(outcome: Outcome) -> str:
    """Why a budget has no say in what is saved, as a sentence; "" where it has."""
    reason = outcome.left_to_torch
    return (
        f"torch's partitioner chose what is saved, without a budget: {reason}. " if reason else ""
    )


def _is_over(outcome: Outcome, options: Options) -> bool:
    scheduled, budget = outcome.scheduled_peak_bytes, budget_bytes(options)
    return scheduled is not None and budget is not None and scheduled > budget


def memory_of(problem: CutProblem, plan: Plan) -> StepMemory:
    """The simulated memory of a step under a plan."""
    return simulate_plan(problem, plan).memory


def infeasible(budget: int, memory: StepMemory, outcome: Outcome) -> str:
    """The message that no plan meets a budget: the lowest peak found, and what is alive at it."""
    phase = "forward" if memory.peak is memory.forward else "backward"
    return (
        f"memory_budget={bytes_text(budget)} cannot be met: the lowest peak found is "
        f"{bytes_text(memory.peak_bytes)}, in {phase} at {memory.peak.peak.node}. In memory there: "
        f"{_largest_alive(memory.peak)}. {_cause(outcome)}{_ADVICE}"
    )


def _largest_alive(timeline: Timeline) -> str:
    """The largest values alive at the peak, by name, and the others together."""
    largest = timeline.alive[:_SHOWN]
    shown = ", ".join(f"{m.node} {bytes_text(m.bytes)}" for m in largest)
    others = timeline.alive[_SHOWN:]
    if not others:
        return shown
    return f"{shown}, and {bytes_text(sum(m.bytes for m in others))} in {len(others)} others"
