"""The least extra time whose simulated peak is within a budget.

Three plans are known: *free* (regions in their first modes, those left whole whose loops would not
lower the peak; the least bytes saved without repeating a heavy op), *lean* (every region keeps the
least), *least* (lean in the shortest chunks, and the forward cut at narrow places, all between them
recomputed). From one to the next there is a stair: the plan of the first part of the forward
changes, the rest stays as it was. The first part, as its values are needed last: they are
recomputed when all others are gone. ::

    free -> lean: region by region          (an MLP gives more bytes a second than attention)
    lean, then in the shortest chunks
    lean -> least: checkpoint by checkpoint
    drop the steps that do not lower the peak below all before them
    take the first whose peak is within the budget
    undo what does not lower it             (relax.py)

So a smaller budget never means a higher peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from mstpass.graph.memory import StepMemory
from mstpass.partition.modes import with_modes
from mstpass.partition.problem import CutProblem, Mode, Plan, RegionModes
from mstpass.partition.simulate import step_memory
from mstpass.partition.solvers.checkpoints import Checkpoints, checkpoints, complete
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.partition.solvers.relax import relaxed
from mstpass.partition.verify import InvalidPlan, verify

_ROOM = 1.005  # times the peak: what a simulation cannot tell apart
_STEPS = 24  # of a stair, at the most
_SAVE = "save"


@dataclasses.dataclass(frozen=True)
class _Step:
    """A plan, and the closed problem and memory that it leads to."""

    problem: CutProblem
    plan: Plan
    memory: StepMemory


def peak_search(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan down the stairs within the budget; the lowest one where none is."""
    free = _free(problem)
    if budget_bytes is None or free.memory.peak_bytes <= budget_bytes:
        return free.plan
    if budget_bytes == 0:
        lean = _lean(problem)
        steps = (free, lean, _least(lean)[0])
        lowest = min(steps, key=lambda step: step.memory.peak_bytes)
        return relaxed(problem, lowest.plan)
    best = free
    for step in _stairs(problem, free):
        if step.memory.peak_bytes < best.memory.peak_bytes:
            best = step
            if best.memory.peak_bytes <= budget_bytes:
                break
    return relaxed(problem, best.plan)


def _step(problem: CutProblem, modes: Mapping[str, str]) -> _Step:
    closed = with_modes(problem, modes)
    saved = min_cut(closed)
    return _Step(closed, Plan(saved, modes), step_memory(closed, saved))


# ---- free --------------------------------------------------------------------------------------
def _free(problem: CutProblem) -> _Step:
    """First modes, without the loops that do not lower the step's peak.

    A loop that saves keeps what the unchunked graph would keep; all it lowers is what its region
    needs while it runs, so these are asked at once: a region needs its loop where, unchunked, more
    than the peak is alive while it runs. What fuses or recomputes keeps less for the backward as
    well, and is asked in two halves where it is not all.
    """
    step = _step(problem, {})
    optional = [region for region in problem.regions if _whole(region) is not None]
    saving = [region for region in optional if region.modes[0].name == _SAVE]
    if saving:
        without = _step(problem, {r.region: _whole(r) or "" for r in saving})
        limit = _ROOM * step.memory.peak_bytes
        needless = [r for r in saving if without.memory.bytes_at(_members(r)) <= limit]
        step = _lower(problem, step, needless)
    limit = step.memory.peak_bytes
    asked = [r for r in optional if r not in saving and _widest(problem, r) <= limit]
    half = len(asked) // 2
    without = _lower(problem, step, asked)
    if without is not step or not half:
        return without
    return _lower(problem, _lower(problem, step, asked[:half]), asked[half:])


def _lower(problem: CutProblem, step: _Step, needless: list[RegionModes]) -> _Step:
    """The step without some regions' loops, if its peak is no higher."""
    if not needless:
        return step
    modes = {**step.plan.modes, **{r.region: _whole(r) or "" for r in needless}}
    other = _step(problem, modes)
    higher = other.memory.peak_bytes > _ROOM * step.memory.peak_bytes
    return step if higher else other


def _whole(region: RegionModes) -> str | None:
    return next((mode.name for mode in region.modes if not mode.loops), None)


def _members(region: RegionModes) -> set[str]:
    return {name for loop in region.modes[0].loops for name in loop.members}


def _widest(problem: CutProblem, region: RegionModes) -> int:
    """Bytes of a region's largest value, which unchunked are alive at once."""
    members = _members(region)
    every = (*problem.values, *problem.backward)
    return max((v.bytes for v in every if v.name in members), default=0)


# ---- lean and least ----------------------------------------------------------------------------
def _kept_bytes(mode: Mode) -> tuple[bool, int]:
    return not mode.loops, sum(result.bytes for loop in mode.loops for result in loop.results)


def _held_bytes(mode: Mode) -> tuple[bool, int, int]:
    return *_kept_bytes(mode), max((loop.inner_bytes for loop in mode.loops), default=0)


def _modes(problem: CutProblem, cost: Callable[[Mode], tuple[int, ...]]) -> dict[str, str]:
    return {region.region: min(region.modes, key=cost).name for region in problem.regions}


def _lean(problem: CutProblem) -> _Step:
    """Every region keeps the least, in the shortest chunks."""
    return _step(problem, _modes(problem, _held_bytes))


def _least(lean: _Step) -> tuple[_Step, Checkpoints]:
    """The same with checkpoints."""
    closed = lean.problem.allowing(recompute_heavy=True)
    found = checkpoints(closed)
    return _Step(closed, Plan(found.saved, lean.plan.modes), found.memory), found


# ---- the stairs between them -------------------------------------------------------------------
def _stairs(problem: CutProblem, free: _Step) -> Iterator[_Step]:
    lean = _modes(problem, _kept_bytes)
    first = {region.region: region.modes[0].name for region in problem.regions}
    before = {**first, **free.plan.modes}
    regions = [name for name in lean if lean[name] != before[name]]
    for count in _counts(len(regions)):
        yield _step(problem, {**before, **{name: lean[name] for name in regions[:count]}})
    shortest = _lean(problem)
    yield shortest
    least, found = _least(shortest)
    yield from _checkpoint_stairs(shortest, least, found.places)
    yield least


def _checkpoint_stairs(
    lean: _Step, least: _Step, places: Mapping[int, frozenset[str]]
) -> Iterator[_Step]:
    problem = least.problem
    index = {value.name: i for i, value in enumerate(problem.values)}
    stops = sorted(places)
    for count in _counts(len(stops))[:-1]:
        stop = stops[count - 1]
        alive = {name for place in stops[:count] for name in places[place]}
        early = {name for name in least.plan.saved if index[name] <= stop}
        late = {name for name in lean.plan.saved if index[name] > stop}
        saved = frozenset(alive | early | late)
        try:
            verify(problem, saved)
        except InvalidPlan:
            saved = complete(problem, saved)
        yield _Step(problem, Plan(saved, lean.plan.modes), step_memory(problem, saved))


def _counts(total: int) -> list[int]:
    """How many of ``total`` have changed at each step."""
    steps = min(total, _STEPS)
    return [total * i // steps for i in range(1, steps + 1)]
