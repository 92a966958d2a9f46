"""The plans without checkpoints that ``peak_search`` walks over, the fastest first::

    free -> region by region, the mode of fewest bytes -> least-memory loops

and of those that lead to checkpoints, for each form::

    no heavy op repeated -> position by position, checkpoints with slow results -> checkpoints

Where the free plan leaves some savings out for the time that they take together, the plan that has
all comes next. There are at most 24 steps from one to the other. One that changes several regions
and reaches the budget is taken region by region.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from mstpass.partition.solvers.candidate import (
    Candidate,
    fewest_saved_bytes,
    least_memory_loops,
)
from mstpass.partition.solvers.checkpoints import checkpoints, slow_results
from mstpass.partition.solvers.choose_modes import (
    fewest_bytes_modes,
    first_loops,
    first_modes,
)
from mstpass.partition.solvers.free_plan import every_saving, free_plan
from mstpass.partition.solvers.min_cut import complete
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import read_by_backward

_BETWEEN = 24  # steps, at most


def sequence(problem: CutProblem, budget_bytes: int | None = None) -> Iterator[Candidate]:
    """The plans without checkpoints, the fastest first.

    Args:
        budget_bytes: before the first plan within it come those with fewer regions changed.
    """
    free, savings = problem.cached(free_plan), problem.cached(every_saving)
    yield free
    if savings is not free:
        yield savings
    yield from _towards_fewest_bytes(problem, savings.plan.modes, budget_bytes)
    yield problem.cached(least_memory_loops)


def to_checkpoints(upper: Candidate) -> Iterator[Candidate]:
    """From a plan that repeats no heavy op to checkpoints of one level."""
    lowest = with_checkpoints(upper)
    slow = with_slow_results(lowest)
    yield upper
    yield from (*_towards_checkpoints(upper, slow), slow)
    yield from (*_towards_checkpoints(slow, lowest), lowest)


def with_checkpoints(plan: Candidate) -> Candidate:
    """The plan of the lowest peak with the same modes and checkpoints of one level."""
    closed = plan.problem.allowing(recompute_heavy=True)
    return Candidate(closed, Plan(closed.cached(checkpoints).plan.saved, plan.plan.modes))


def _towards_fewest_bytes(
    problem: CutProblem, before: Mapping[str, str], budget_bytes: int | None
) -> Iterator[Candidate]:
    """Put region after region in the mode of the fewest bytes, the forward's first region first.

    Regions that are whole until a budget asks for loops have their first mode with loops before.
    The step of several regions that reaches the budget is taken region by region.
    """
    fewest = fewest_bytes_modes(problem)
    now = {**first_modes(problem), **before}
    for modes in ({**fewest, **first_loops(problem)}, fewest):
        yield from _one_by_one(problem, now, modes, budget_bytes)
        now |= modes


def _one_by_one(
    problem: CutProblem, now: Mapping[str, str], modes: Mapping[str, str], budget_bytes: int | None
) -> Iterator[Candidate]:
    changed = [(name, mode) for name, mode in modes.items() if mode != now[name]]
    plan_at = lambda count: fewest_saved_bytes(problem, {**now, **dict(changed[:count])})
    for done, count in itertools.pairwise((0, *_counts(len(changed)))):
        step = plan_at(count)
        if budget_bytes is not None and step.lowered_within(budget_bytes):
            yield from _not_beyond(step, map(plan_at, range(done + 1, count)))
        yield step


def _not_beyond(step: Candidate, plans: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those of the plans that are no slower than a step and have no lower peak.

    A smaller budget, for which the step is above it, would not see a lower one.
    """
    least = step.simulation.lowered_peak_bytes
    return (
        plan for plan in plans if plan.us <= step.us and plan.simulation.lowered_peak_bytes >= least
    )


def _towards_checkpoints(upper: Candidate, lower: Candidate) -> Iterator[Candidate]:
    """Plans that save as ``lower`` does up to a position in the forward, as ``upper`` after it."""
    problem, plan = lower.problem, lower.plan
    index = {value.name: i for i, value in enumerate(problem.values)}
    positions = sorted(index[name] for name in plan.saved)
    for count in _counts(len(positions))[:-1]:
        position = positions[count - 1]
        before = {name for name in plan.saved if index[name] <= position}
        after = {n for n in upper.plan.saved if index.get(n, position) > position}
        yield Candidate(problem, Plan(complete(problem, frozenset(before | after)), plan.modes))


def _counts(total: int) -> list[int]:
    """In equal steps from above 0 to ``total``: how much of the change each plan has made."""
    steps = min(total, _BETWEEN)
    return [total * i // steps for i in range(1, steps + 1)]


def with_slow_results(plan: Candidate) -> Candidate:
    """A plan with checkpoints that also saves the results of slow ops."""
    saved = plan.plan.saved | slow_results(plan.problem, plan.plan.saved)
    kept = read_by_backward(plan.problem, saved)
    return Candidate(plan.problem, Plan(kept, plan.plan.modes))
