"""Checkpoints by dynamic programming: equal to every placement tried, on small chains."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstpass.bench import problems
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.candidate import Candidate, least_memory_loops
from mstpass.partition.solvers.checkpoint_plans import CheckpointPlans, checkpoint_plans
from mstpass.partition.solvers.checkpoint_table import CheckpointTable, Costs, Form, Placement
from mstpass.partition.solvers.checkpoints import checkpoints
from mstpass.problem.problem import CutProblem
from tests.problems import residual_stream

_BYTES, _TIMES = st.integers(0, 9), st.integers(0, 9)


@st.composite
def chains(draw: st.DrawFn) -> Costs:
    """Up to five segments in up to three forms."""
    count = draw(st.integers(1, 5))

    def numbers(of: st.SearchStrategy[int], size: int = count) -> np.ndarray:
        return np.array(draw(st.lists(of, min_size=size, max_size=size)), float)

    def form(saves: bool) -> Form:
        kept = np.zeros((count, count))
        for a in reversed(range(count - 1)):
            kept[a] = kept[a + 1] + np.where(np.arange(count) > a, draw(_BYTES), 0)
        saved = numbers(st.integers(1, 5)) if saves else np.zeros(count)
        needed = numbers(_BYTES), numbers(_BYTES), kept
        return Form(*needed, numbers(_TIMES), numbers(_TIMES), saved)

    sizes = numbers(st.integers(0, 6), count + 1)
    shared = draw(st.integers(0, 3))  # alive at all stops but the first
    new = np.zeros((count + 1, count + 1))
    for a in range(count):
        for m in range(a + 1, count):
            new[a, m] = sizes[m] + (shared if a == 0 else 0)
    forms = [form(False), *(form(draw(st.booleans())) for _ in range(draw(st.integers(0, 2))))]
    return Costs(forms, numbers(_TIMES), numbers(_BYTES, count + 1), new, new)


def _forward(costs: Costs, a: int, b: int, forward_bytes: np.ndarray) -> float:
    return float(max(forward_bytes[s] + costs.new_bytes[a, s] for s in range(a, b)))


def _fastest(costs: Costs, room: float, levels: int | None) -> float:
    """The least time within a room, of every way there is to place checkpoints."""
    count, least_us = costs.segments, costs.least_us

    forward = functools.partial(_forward, costs)

    def unit(a: int, b: int, room: float) -> Iterator[float]:
        for form in costs.forms:
            needed = max(form.backward_bytes[s] + form.kept_bytes[a, s] for s in range(a, b))
            needed = max(needed, forward(a, b, form.forward_bytes))
            if not form.saves and needed <= room:
                yield (form.us - least_us)[a:b].sum() + form.onward_us[a : b - 1].sum()

    @functools.cache
    def nested(a: int, b: int, room: float, depth: float) -> float:
        ways = list(unit(a, b, room))
        for m in range(a + 1, b) if depth else ():
            if forward(a, m, costs.forward_bytes) + costs.between_bytes[b] <= room:
                behind = nested(m, b, room - costs.new_bytes[a, m], depth)
                before = nested(a, m, room, depth - 1)
                ways.append(costs.forward_us[a:m].sum() + behind + before)
        return min(ways, default=math.inf)

    @functools.cache
    def saved(a: int, room: float) -> float:
        ways = list(unit(a, count, room))
        for m in range(a + 1, count):
            if forward(a, m, costs.forward_bytes) <= room:
                behind = saved(m, room - costs.new_bytes[a, m])
                ways.append(behind + nested(a, m, room, math.inf if levels is None else levels))
        for form in costs.forms:
            needed = max(form.backward_bytes[a], form.forward_bytes[a]) + form.saved_bytes[a]
            if form.saves and needed <= room:
                left = room - form.saved_bytes[a] - (costs.new_bytes[a, a + 1])
                behind = saved(a + 1, left) if a + 1 < count else 0.0
                ways.append(form.us[a] - least_us[a] + behind)
        return min(ways, default=math.inf)

    return saved(0, room) + least_us.sum()


def _answer(placements: Sequence[Placement], room: float) -> float:
    return min((one.us for one in placements if one.room_bytes <= room), default=math.inf)


@pytest.mark.parametrize("levels", [0, 1, None])
@settings(deadline=None)
@given(costs=chains())
def test_no_placement_is_faster(levels: int | None, costs: Costs) -> None:
    most = costs.least_bytes + 40
    placements = CheckpointTable(costs, most, cells=40).placements(levels)
    for room in range(int(costs.least_bytes), int(most) + 1):
        found, least = _answer(placements, room), _fastest(costs, room, levels)
        assert found == pytest.approx(least, abs=1e-2)  # and what stored bytes are priced at


@settings(deadline=None)
@given(costs=chains())
def test_less_room_is_never_faster(costs: Costs) -> None:
    placements = CheckpointTable(costs, costs.least_bytes + 40, cells=40).placements()
    rooms, times = [one.room_bytes for one in placements], [one.us for one in placements]
    assert rooms == sorted(rooms, reverse=True) and times == sorted(times)


@pytest.mark.parametrize("name", ["gpt2-12", "t5-6", "vit-12"])
def test_estimates_are_what_is_simulated(name: str) -> None:
    """Peaks are those of the rooms, and no step takes longer than its placement says."""
    plans = checkpoint_plans(problems.load(name))
    assert plans is not None
    for placement in plans.placements[:: max(1, len(plans.placements) // 6)]:
        found = plans.candidate(placement)
        assert found is not None
        assert found.peak_bytes <= 1.15 * placement.room_bytes
        assert found.us <= 1.02 * placement.us


def test_the_fastest_within_a_budget_may_have_an_estimate_far_above_it() -> None:
    """Copies of cheap values halve some peaks: bloom's of 1,189 KiB is 769 KiB with them."""
    lean = least_memory_loops(problems.load("mlps-1"))
    budget = lean.lowered_peak_bytes
    fastest, other = (Candidate(lean.problem, lean.plan) for _ in range(2))
    found = {1.55 * budget: fastest, 0.9 * budget: other}

    class Plans(CheckpointPlans):
        placements = flat = tuple(Placement({}, (), room, 1 / room) for room in found)
        _nested_bytes, _most_bytes = 0.0, 2.0 * budget

        def candidate(self, placement: Placement) -> Candidate:
            return found[placement.room_bytes]

    assert Plans(lean.problem, []).within(budget) is fastest


def _at_every(problem: CutProblem, step: int) -> int:
    """The peak where every so many blocks are saved, as one would by hand."""
    names = [v.name for v in problem.values if v.name.startswith("x") and "_" not in v.name]
    return StepSimulation(problem, frozenset(names[::step])).peak_bytes


@pytest.mark.parametrize("inner", [1, 4, 8])
def test_no_equal_distance_has_a_lower_peak(inner: int) -> None:
    problem = residual_stream(blocks=36, inner=inner)
    found = checkpoints(problem).simulation.peak_bytes
    assert found <= 1.005 * min(_at_every(problem, step) for step in range(1, 13))


# Peaks in MiB that a walk over up to sixteen sets of places found, each simulated.
_BY_WALK = {
    "llama-8": 2092.4,
    "vit-12": 796.8,
    "gpt2-12": 1474.5,
    "bert-12": 1733.6,
    "t5-6": 1243.6,
}


@pytest.mark.parametrize("name", _BY_WALK)
def test_no_peak_is_above_that_of_a_walk_over_places(name: str) -> None:
    loops = least_memory_loops(problems.load(name))
    found = checkpoints(loops.problem.allowing(recompute_heavy=True))
    assert found.simulation.peak_bytes <= 1.001 * _BY_WALK[name] * 2**20


@settings(deadline=None, max_examples=30)
@given(costs=chains(), host_bytes=st.integers(1, 30))
def test_saved_stops_are_within_the_hosts_budget(costs: Costs, host_bytes: int) -> None:
    """What they take there is rounded up to cells, never down."""
    table = CheckpointTable(costs, costs.least_bytes + 40, cells=40)
    for placement in table.placements(host_bytes=float(host_bytes)):
        saved = [0, *sorted(stop for stop, level in placement.levels.items() if not level)]
        taken = sum(costs.pinned_bytes[a, m] for a, m in itertools.pairwise(saved))
        assert taken <= host_bytes
