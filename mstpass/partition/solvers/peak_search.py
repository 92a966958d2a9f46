"""The least extra time whose simulated peak is within a budget.

Five plans are known: *free* (regions in their first modes, those left whole whose loops would not
lower the peak; the least bytes saved without repeating a heavy op), *lean* (every region keeps the
least), *least* (lean in the shortest chunks, and the forward cut at narrow places, all between them
recomputed), *dear* (least, but what heavy ops give is saved where they take long for its bytes:
attention), *nested* (two levels of such places, most blocks recomputed twice, where that is lower).
From one to the next there is a stair: the plan of the first part of the forward changes, the rest
stays as it was. The first part, as its values are needed last: they are recomputed when all others
are gone. ::

    free -> lean: region by region          (an MLP gives more bytes a second than attention)
    lean, then in the shortest chunks
    lean -> dear -> least: checkpoint by checkpoint
    least -> nested: place by place
    take the first step whose peak is within the budget, the lowest where none is
    undo what the budget has room for       (relax.py)

So a smaller budget never means a higher peak.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.checkpoints import (
    Checkpoints,
    Places,
    at_places,
    checkpoints,
    complete,
    nested_checkpoints,
)
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.partition.solvers.recomputed_heavy_ops import repeated
from mstpass.partition.solvers.spend_slack import relaxed
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Mode, Plan, RegionModes
from mstpass.problem.verify import InvalidPlan, read, verify

_ROOM = 1.005  # times the peak: what a simulation cannot tell apart
_STEPS = 24  # of a stair, at the most
_SAVE = "save"


@dataclasses.dataclass(frozen=True)
class _Step:
    """A plan, and the closed problem and memory that it leads to."""

    problem: CutProblem
    plan: Plan

    @functools.cached_property
    def simulation(self) -> StepSimulation:
        return StepSimulation(self.problem, self.plan.saved, self.plan.nested)

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """All of it is in memory when the forward ends: the peak is no lower."""
        return sum(v.bytes for v in self.problem.values if v.name in self.plan.saved)


def peak_search(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan down the stairs within the budget; the lowest one where none is."""
    free = problem.once(_free)
    if budget_bytes is None or free.peak_bytes <= budget_bytes:
        return free.plan
    if budget_bytes == 0:
        placed = (problem.once(_least), problem.once(_nested))
        steps = [problem.once(_lean), *(one.step for one in placed if one is not None)]
        lowest = min((free, *steps), key=lambda step: step.peak_bytes)
        return relaxed(problem, lowest.plan, 0)
    for step in _stairs(problem, free):
        if step.saved_bytes <= budget_bytes and step.simulation.within(budget_bytes):
            return relaxed(problem, step.plan, budget_bytes)
    lowest = min((free, *_stairs(problem, free)), key=lambda step: step.peak_bytes)
    return relaxed(problem, lowest.plan, budget_bytes)


def _step(problem: CutProblem, modes: Mapping[str, str]) -> _Step:
    closed = with_modes(problem, modes)
    return _Step(closed, Plan(min_cut(closed), modes))


# ---- free --------------------------------------------------------------------------------------
def _free(problem: CutProblem) -> _Step:
    """First modes, without the loops that do not lower the step's peak.

    A loop that saves keeps what the unchunked graph would keep; all it lowers is what its region
    needs while it runs, so these are asked at once: a region needs its loop where, unchunked, more
    than the peak is alive while it runs. What fuses or recomputes keeps less for the backward as
    well, and is asked in two halves where it is not all.
    """
    optional = {region.region: region for region in problem.regions if _whole(region) is not None}

    @functools.cache
    def without(names: frozenset[str]) -> _Step:
        """These regions without their loops, all others in their first modes."""
        modes = {name: _whole(r) or "" for name, r in optional.items() if name in names}
        return _step(problem, modes)

    def and_without(names: frozenset[str], others: Iterable[str]) -> frozenset[str]:
        """More regions without their loops, if the peak is no higher."""
        more = names.union(others)
        limit = _ROOM * without(names).peak_bytes
        return more if without(more).simulation.within(limit) else names

    names = frozenset[str]()
    saving = frozenset(n for n, region in optional.items() if region.modes[0].name == _SAVE)
    if saving:
        limit = _ROOM * without(names).peak_bytes
        alive = without(saving).simulation.bytes_at()
        names = and_without(names, (n for n in saving if _most(alive, optional[n]) <= limit))
    # Unchunked, a region's largest value is alive at once.
    sizes = {value.name: value.bytes for value in (*problem.values, *problem.backward)}
    others = [name for name in optional if name not in saving]
    highest = without(names).peak_bytes
    asked = [n for n in others if _most(sizes, optional[n]) <= highest]
    half = len(asked) // 2
    found = and_without(names, asked)
    if found == names and half:
        found = and_without(and_without(names, asked[:half]), asked[half:])
    return without(found)


def _most(sizes: Mapping[str, int], region: RegionModes) -> int:
    """The largest of the sizes of a region's members."""
    members = {name for loop in region.modes[0].loops for name in loop.members}
    return max((sizes.get(name, 0) for name in members), default=0)


def _whole(region: RegionModes) -> str | None:
    return next((mode.name for mode in region.modes if not mode.loops), None)


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


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A step with checkpoints, and where they are."""

    step: _Step
    found: Checkpoints


def _least(problem: CutProblem) -> _Placed | None:
    """The same with checkpoints; None where no saved set can be lower."""
    lean = problem.once(_lean)
    if lean.peak_bytes <= _ROOM * _own_bytes(lean):
        return None
    closed = lean.problem.allowing(recompute_heavy=True)
    return _placed(closed, lean.plan.modes, checkpoints(closed))


def _nested(problem: CutProblem) -> _Placed | None:
    """The same with two levels of checkpoints, where that is lower for certain."""
    least = problem.once(_least)
    found = nested_checkpoints(least.step.problem) if least is not None else None
    if least is None or found is None:
        return None
    if found.simulation.peak_bytes * _ROOM > least.step.peak_bytes:
        return None
    return _placed(least.step.problem, least.step.plan.modes, found)


def _placed(closed: CutProblem, modes: Mapping[str, str], found: Checkpoints) -> _Placed:
    return _Placed(_Step(closed, Plan(found.saved, modes, found.nested)), found)


def _own_bytes(step: _Step) -> int:
    """What the backward itself has in memory at the peak, whatever crosses: gradients above all."""
    peak = step.simulation.memory.peak
    own = {value.name for value in step.problem.backward}
    return sum(moment.bytes for moment in peak.alive if moment.node in own)


# ---- the stairs between them -------------------------------------------------------------------
def _stairs(problem: CutProblem, free: _Step) -> Iterator[_Step]:
    lean = _modes(problem, _kept_bytes)
    first = {region.region: region.modes[0].name for region in problem.regions}
    before = {**first, **free.plan.modes}
    regions = [name for name in lean if lean[name] != before[name]]
    for count in _counts(len(regions)):
        yield _step(problem, {**before, **{name: lean[name] for name in regions[:count]}})
    shortest, least, nested = problem.once(_lean), problem.once(_least), None
    yield shortest
    if least is not None:
        upper, places, dear = shortest, least.found.places, _dear(least.step)
        # Otherwise it is no step on the way: it saves more, and least needs no more memory.
        if not dear.simulation.within(least.step.peak_bytes):
            yield from _checkpoint_stairs(upper, dear, places)
            yield dear
            upper = dear
        yield from _checkpoint_stairs(upper, least.step, places)
        yield least.step
        nested = problem.once(_nested)
    if nested is not None:
        yield from _nested_stairs(nested)


def _dear(least: _Step) -> _Step:
    """Least, with what heavy ops give that take longer for its bytes than all of them together."""
    heavies = repeated(least.problem, least.plan.saved)
    us = sum(heavy.us for heavy in heavies) / max(1, sum(heavy.bytes for heavy in heavies))
    kept = (heavy.results for heavy in heavies if heavy.us_per_byte > us)
    saved = read(least.problem, least.plan.saved.union(*kept))
    return _Step(least.problem, Plan(saved, least.plan.modes))


def _checkpoint_stairs(upper: _Step, step: _Step, places: Places) -> Iterator[_Step]:
    """A step up to a place, the one above it behind.

    Places are the checkpoints and what is saved in any case (gradients of loops): that may be all.
    """
    problem, plan = step.problem, step.plan
    index = {value.name: i for i, value in enumerate(problem.values)}
    stops = sorted({*places, *(index[name] for name in plan.saved)})
    for count in _counts(len(stops))[:-1]:
        stop = stops[count - 1]
        alive = {name for place in places if place <= stop for name in places[place]}
        early = {name for name in plan.saved if index[name] <= stop}
        late = {name for name in upper.plan.saved if index[name] > stop}
        saved = frozenset(alive | early | late)
        try:
            verify(problem, saved)
        except InvalidPlan:
            saved = complete(problem, saved)
        yield _Step(problem, Plan(saved, plan.modes))


def _nested_stairs(nested: _Placed) -> Iterator[_Step]:
    """Nested up to a place, saved behind it."""
    found = nested.found
    every = dict(sorted({**found.places, **found.inner}.items()))
    stops = sorted(found.inner)
    for count in _counts(len(stops)):
        inner = {stop: every[stop] for stop in stops[:count]}
        places = {stop: names for stop, names in every.items() if stop not in inner}
        step = at_places(nested.step.problem, places, inner)
        yield _placed(nested.step.problem, nested.step.plan.modes, step).step


def _counts(total: int) -> list[int]:
    """How many of ``total`` have changed at each step."""
    steps = min(total, _STEPS)
    return [total * i // steps for i in range(1, steps + 1)]
