"""What simple solvers share: saved sets by a walk from what backward needs, and stairs of plans.

A *stair* is a sequence of plans that does not depend on the budget, the fastest first. The plan for
a budget is the first whose simulated peak is within it, so less budget never means a higher peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Mode, Plan, RegionModes, Value

FREE_OVERHEAD = 0.02  # extra time, as a fraction, that no budget at all may cost


@dataclasses.dataclass(frozen=True)
class Step:
    """A plan with what it needs of memory and time."""

    plan: Plan
    peak_bytes: int
    us: float


def step_of(problem: CutProblem, modes: Mapping[str, str], keep: Callable[[Value], bool]) -> Step:
    """The step in which backward's needs are saved where ``keep`` holds or nothing else helps."""
    closed = with_modes(problem, modes)
    saved = saved_where(closed, keep)
    step = StepSimulation(closed, saved)
    return Step(Plan(saved, dict(modes)), step.peak_bytes, step.us)


def first_within(stair: Iterable[Step], budget_bytes: int | None) -> Plan:
    """The first plan within the budget, from the free one on; the lowest where none is.

    The free plan is the lowest of those that cost at most ``FREE_OVERHEAD``.
    """
    steps = list(stair)
    limit_us = (1 + FREE_OVERHEAD) * min(step.us for step in steps)
    free = min((s for s in steps if s.us <= limit_us), key=lambda step: step.peak_bytes)
    if budget_bytes is None:
        return free.plan
    behind = steps[steps.index(free) :]
    within = (step for step in behind if step.peak_bytes <= budget_bytes)
    return next(within, min(behind, key=lambda step: step.peak_bytes)).plan


def saved_where(problem: CutProblem, keep: Callable[[Value], bool]) -> frozenset[str]:
    """Walk back from what backward needs; save a value where ``keep`` says so, or where it may
    not be recomputed, and go on to its inputs where neither holds."""
    problem = problem.allowing(recompute_heavy=True)
    by_name = {value.name: value for value in problem.values}
    stuck = _stuck(problem)
    saved: set[str] = set()
    seen: set[str] = set()
    stack = [value.name for value in problem.values if value.needed]
    while stack:
        value = by_name[stack.pop()]
        if value.free or value.name in seen:
            continue
        seen.add(value.name)
        if value.savable and (value.name in stuck or keep(value)):
            saved.add(value.name)
        else:
            stack.extend(value.inputs)
    return frozenset(saved)


def _stuck(problem: CutProblem) -> set[str]:
    """Values that cannot be had in backward but by saving them."""
    stuck: set[str] = set()
    savable = {value.name for value in problem.values if value.savable}
    for value in problem.values:
        lost = any(name in stuck and name not in savable for name in value.inputs)
        if not value.free and (problem.keeps(value) or lost):
            stuck.add(value.name)
    return stuck


# ---- modes -------------------------------------------------------------------------------------
def first_modes(problem: CutProblem) -> dict[str, str]:
    return {region.region: region.modes[0].name for region in problem.regions}


def whole_modes(problem: CutProblem) -> dict[str, str]:
    """No loops, where a region may do without."""
    return {r.region: min(r.modes, key=lambda m: bool(m.loops)).name for r in problem.regions}


def lean_modes(problem: CutProblem) -> dict[str, str]:
    """Of each region the one that keeps least, and of these the one that needs least to run."""
    return {region.region: lean_mode(region).name for region in problem.regions}


def lean_mode(region: RegionModes) -> Mode:
    return min(region.modes, key=_held_bytes)


def kept_bytes(mode: Mode) -> int:
    """Of what a mode's loops return."""
    return sum(result.bytes for loop in mode.loops for result in loop.results)


def _held_bytes(mode: Mode) -> tuple[bool, int, int]:
    inner_bytes = max((loop.inner_bytes for loop in mode.loops), default=0)
    return not mode.loops, kept_bytes(mode), inner_bytes
