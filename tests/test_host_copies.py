"""Copies to the host and back as plain data: where they are placed, simulated and chosen."""

from __future__ import annotations

import dataclasses
import itertools
import operator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mstpass.bench.problems import load
from mstpass.memory.host_copies import (
    HostCopy,
    offload_copies,
    reload_copies,
    with_reloads,
)
from mstpass.memory.reloads import Reload, reloads
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.partition.solvers.least_host_memory import least_host_bytes, more_host_memory
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.op import CALL, INPUT, REDUCTION
from mstpass.problem.problem import (
    MAY_OFFLOAD,
    MUST_OFFLOAD,
    CutProblem,
    Host,
    Plan,
    Value,
    pinned_bytes,
)
from mstpass.problem.saved_set import InvalidPlan, verify

LAYERS, BYTES, US = 6, 1024, 10.0
times = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=12)


def chain(speed: float, budget_bytes: int = 2**30, layers: int = LAYERS) -> CutProblem:
    """Layers ``x1 = f(x0), ...`` of which backward reads every ``x``; each op takes ``US``.

    Args:
        speed: the bytes that a copy moves in the time of one op.
    """
    values = [Value("x0", BYTES, kind=INPUT, free=True)]
    backward = [Value("t", 8, kind=INPUT)]
    values += [
        dataclasses.replace(
            Value(f"x{i}", BYTES, (f"x{i - 1}",), CALL, us=US, heavy=True, needed=True),
            offload=MAY_OFFLOAD,
        )
        for i in range(1, layers + 1)
    ]
    values.append(Value("loss", 8, (f"x{layers}",), CALL, us=US, heavy=True))
    for i in range(layers, 0, -1):
        before = backward[-1].name
        backward.append(Value(f"g{i}", 8, (before, f"x{i}"), CALL, us=US))
    return CutProblem(
        tuple(values),
        backward=tuple(backward),
        outputs=("loss",),
        gradients=(backward[-1].name,),
        host=Host(budget_bytes, speed / US, speed / US),
    )


ALL = frozenset(f"x{i}" for i in range(1, LAYERS + 1))


def _without_host(problem: CutProblem) -> CutProblem:
    return dataclasses.replace(problem, host=None)


# ---- placement -----------------------------------------------------------------------------------
@given(times, st.data())
def test_copies_to_the_host_begin_behind_their_values_and_end_before_the_waits(
    times_us: list[float], data: st.DataObject
) -> None:
    values = sorted(_values(times_us, data), key=operator.itemgetter(2))
    copies = offload_copies(times_us, values, bytes_per_us=1.0)
    clock = [0.0, *itertools.accumulate(times_us)]
    _check_one_after_the_other(copies)
    places = {name: place for name, _, place in values}
    for copy in copies:
        assert copy.begun == places[copy.name] + 1 <= copy.awaited <= len(times_us)
        assert copy.start_us >= clock[copy.begun]
        waits_at_end = copy.awaited == len(times_us)
        assert copy.end_us <= clock[copy.awaited] or waits_at_end
        if copy.awaited > copy.begun:  # and no later than need be
            assert copy.end_us > clock[copy.awaited - 1]
    stalls_us = sum(copy.stall_us for copy in copies)
    assert stalls_us == max([0.0, *(copy.end_us - clock[-1] for copy in copies)])


@given(times, st.data())
def test_copies_from_the_host_are_there_when_they_are_read(
    times_us: list[float], data: st.DataObject
) -> None:
    values = _values(times_us, data)
    back = sorted((Reload(name, size, (p,)) for name, size, p in values), key=_first_use)
    copies = reload_copies(times_us, back, bytes_per_us=1.0)
    clock = [0.0, *itertools.accumulate(times_us)]
    _check_one_after_the_other(copies)
    stalled_us = 0.0
    for copy in copies:
        assert copy.begun <= copy.awaited == {name: place for name, _, place in values}[copy.name]
        stalled_us += copy.stall_us
        assert copy.end_us <= clock[copy.awaited] + stalled_us
    if stalled_us:  # only if copies need all the time there is from the start
        tolerated_us = 0.01 * max(times_us) * len(copies)
        assert copies[0].begun == 0 or stalled_us <= tolerated_us


def _values(times_us: list[float], data: st.DataObject) -> list[tuple[str, int, int]]:
    places = st.lists(st.integers(0, len(times_us) - 1), max_size=6)
    sizes = st.integers(1, 60)
    return [(f"v{i}", data.draw(sizes), p) for i, p in enumerate(data.draw(places))]


def _check_one_after_the_other(copies: list[HostCopy]) -> None:
    for copy, after in itertools.pairwise(copies):
        assert copy.end_us <= after.start_us
    for copy in copies:
        assert copy.end_us - copy.start_us == pytest.approx(copy.bytes)


def test_a_reload_begins_just_early_enough() -> None:
    (copy,) = reload_copies([10.0] * 8, [Reload("v", 16, (6,))], bytes_per_us=1.0)
    assert (copy.begun, copy.awaited, copy.stall_us) == (4, 6, 0.0)  # 20 us for 16 of copying


def _first_use(reload: Reload) -> int:
    return reload.first_use


@pytest.mark.parametrize("attention_us", [100.0, 5000.0])
def test_a_value_is_copied_again_behind_a_long_op_and_not_behind_a_short_one(
    attention_us: float,
) -> None:
    """A norm's input, which its gradient reads behind attention."""
    ops = [
        Value("v", 1600, kind=INPUT),
        Value("wide", 3200, ("v",)),
        Value("scale", 1, ("wide",), REDUCTION),
        Value("normed", 1600, ("wide", "scale")),
        Value("attention", 1600, ("normed",), CALL, us=attention_us),
        Value("gradient", 1600, ("attention", "normed", "scale"), CALL),
    ]
    cheap = {"wide", "normed"}
    times_us = [op.us for op in ops]
    found = reloads(ops, times_us, {"v": 1600}, cheap, frozenset(), bytes_per_us=100.0)
    readers = [reload.readers for reload in found.copies]
    if attention_us < 1600:
        assert readers == [(2, 4, 5)]
        return
    assert readers == [(2, 4), (5,)]
    assert [reload.chain for reload in found.copies] == [(1, 3), (1, 3)]
    host = Host(0, 100.0, 100.0)
    names = [op.name for op in with_reloads(ops, {"v"}, cheap, frozenset(), host)[0]]
    behind = ["v:reload:2", "v:2", "wide:2", "normed:2", "gradient"]
    assert names == ["v:host", "v:reload", "v", *["wide", "scale", "normed", "attention"], *behind]


# ---- simulation ----------------------------------------------------------------------------------
def test_a_value_on_the_host_is_freed_behind_its_copy_and_allocated_again() -> None:
    problem = chain(speed=BYTES)  # a copy takes as long as an op
    step = StepSimulation(problem, ALL, offloaded=ALL)
    at = {moment.node: moment.bytes for moment in step.forward.moments}
    assert at["x1"] == BYTES  # x0 is an input of the step
    assert max(at.values()) <= 3 * BYTES  # one is computed, one read, one copied
    at = {moment.node: moment.bytes for moment in step.backward.moments}
    assert max(at.values()) <= 3 * BYTES + 3 * 8
    names = [op.name for op in step.program.backward]
    assert names.index("x1:reload") < names.index("x1") < names.index("g1")
    assert StepSimulation(problem, ALL).peak_bytes >= LAYERS * BYTES


def test_slow_copies_take_time_and_memory() -> None:
    fast, slow = (StepSimulation(chain(speed), ALL, offloaded=ALL) for speed in (BYTES, BYTES / 4))
    assert slow.us > 2 * 4 * LAYERS * US > fast.us
    assert slow.peak_bytes > fast.peak_bytes


# ---- choice --------------------------------------------------------------------------------------
def test_the_search_meets_a_budget_by_the_host() -> None:
    problem = chain(speed=4 * BYTES)
    without = _without_host(problem)
    budget = 4 * BYTES
    plan, other = peak_search(problem, budget), peak_search(without, budget)
    assert plan.offloaded and not other.offloaded
    ours, theirs = simulate_plan(problem, plan), simulate_plan(without, other)
    assert ours.peak_bytes <= budget < theirs.peak_bytes
    assert ours.us == theirs.us  # all copies run beside ops
    verify(problem, plan.saved, plan.nested, plan.offloaded)


@pytest.mark.parametrize("values_on_host", [1, 2, 3])
def test_a_plan_stays_within_the_hosts_budget(values_on_host: int) -> None:
    problem = chain(speed=4 * BYTES, budget_bytes=values_on_host * BYTES)
    for budget in (0, 3 * BYTES, 4 * BYTES, 5 * BYTES):
        assert len(peak_search(problem, budget).offloaded) <= values_on_host


def test_without_a_budget_nothing_is_offloaded() -> None:
    assert not peak_search(chain(speed=4 * BYTES), None).offloaded


def _check_least_host_bytes(problem: CutProblem, limit_bytes: int) -> None:
    """The budget that is named is enough, and a byte less is not."""
    assert _peak(problem, limit_bytes, host_bytes=0) > limit_bytes
    needed = least_host_bytes(problem, limit_bytes)
    assert needed
    assert _peak(problem, limit_bytes, needed) <= limit_bytes
    assert _peak(problem, limit_bytes, needed - 1) > limit_bytes


@pytest.mark.parametrize("layers", [6, 12])
@pytest.mark.parametrize("limit", [3 * BYTES, 4 * BYTES, 5 * BYTES])
def test_the_least_host_budget_is_enough_and_less_is_not(layers: int, limit: int) -> None:
    _check_least_host_bytes(chain(speed=4 * BYTES, budget_bytes=0, layers=layers), limit)


def _chain_of(layers: list[tuple[int, bool]]) -> CutProblem:
    """A chain of layers of these sizes that must not, or may, be recomputed."""
    problem = chain(speed=1e6, budget_bytes=0, layers=len(layers))
    given_to = {f"x{i}": layer for i, layer in enumerate(layers, 1)}
    values = (
        dataclasses.replace(v, bytes=given_to[v.name][0] * BYTES, heavy=given_to[v.name][1])
        if v.name in given_to
        else v
        for v in problem.values
    )
    return dataclasses.replace(problem, values=tuple(values))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=3, max_size=9),
    st.floats(0.05, 0.95),
)
def test_the_least_host_budget_for_values_of_many_sizes(
    layers: list[tuple[int, bool]], share: float
) -> None:
    problem = _chain_of(layers)
    by_host, without = _lowest_peaks(problem)
    assume(by_host < without)
    _check_least_host_bytes(problem, int(by_host + share * (without - by_host)))


def test_the_search_takes_the_plan_whose_host_budget_is_named() -> None:
    """It is none of those that the search looks at otherwise."""
    sizes = [2, 4, 3, 8, 1, 4, 1, 1, 2, 1, 8, 3]
    heavy = {1, 5, 6, 8, 9, 10, 11}
    problem = _chain_of([(size, i in heavy) for i, size in enumerate(sizes, 1)])
    _check_least_host_bytes(problem, 16162)


def test_the_least_host_budget_of_a_model() -> None:
    """All values of at least 1 MiB may wait on the host, by copies that take next to no time."""
    problem = load("llama-1-small")
    values = tuple(
        dataclasses.replace(v, offload=MAY_OFFLOAD if v.bytes >= 2**20 and not v.free else "")
        for v in problem.values
    )
    problem = dataclasses.replace(problem, values=values, host=Host(0, 1e6, 1e6))
    by_host, without = _lowest_peaks(problem)
    assert by_host < without
    _check_least_host_bytes(problem, (by_host + without) // 2)


def test_a_host_budget_that_is_given_is_not_named_again() -> None:
    limit, needed = 3 * BYTES, 9 * BYTES
    few = chain(speed=4 * BYTES, budget_bytes=needed - 1, layers=12)
    enough = chain(speed=4 * BYTES, budget_bytes=needed, layers=12)
    assert least_host_bytes(few, limit) == needed
    assert "With host_budget=9.0 KiB or more" in more_host_memory(few, limit)
    assert not more_host_memory(enough, limit)


def _lowest_peaks(problem: CutProblem) -> tuple[int, int]:
    """The lowest peaks found with as much host memory as there may be, and without."""
    return _peak(problem, 0, host_bytes=2**40), _peak(problem, 0, host_bytes=0)


def _peak(problem: CutProblem, limit_bytes: int, host_bytes: int) -> int:
    assert problem.host is not None
    host = dataclasses.replace(problem.host, budget_bytes=host_bytes)
    given_host = dataclasses.replace(problem, host=host)
    return simulate_plan(given_host, peak_search(given_host, limit_bytes)).lowered_peak_bytes


def test_pinned_memory_is_handed_out_in_powers_of_two() -> None:
    assert pinned_bytes([1024, 1025, 3, 0]) == 1024 + 2048 + 4


# ---- verification --------------------------------------------------------------------------------
def test_plans_that_cannot_be_carried_out() -> None:
    problem = chain(BYTES, budget_bytes=BYTES)
    with pytest.raises(InvalidPlan, match="no host memory"):
        verify(_without_host(problem), ALL, offloaded={"x1"})
    with pytest.raises(InvalidPlan, match=r"not saved: \['x2'\]"):
        verify(problem.allowing(True), ALL - {"x2"}, offloaded={"x2"})
    with pytest.raises(InvalidPlan, match="host_budget is 1024"):
        verify(problem, ALL, offloaded={"x1", "x2"})
    held = dataclasses.replace(problem.values[1], offload="")
    stays = dataclasses.replace(problem, values=(problem.values[0], held, *problem.values[2:]))
    with pytest.raises(InvalidPlan, match="x1 cannot be offloaded"):
        verify(stays, ALL, offloaded={"x1"})
    with pytest.raises(ValueError, match="offload='maybe' is unknown"):
        dataclasses.replace(held, offload="maybe")


def test_what_must_be_offloaded_is_so_in_every_plan_and_needs_no_budget() -> None:
    problem = chain(4 * BYTES, budget_bytes=0)
    first = dataclasses.replace(problem.values[1], offload=MUST_OFFLOAD)
    problem = dataclasses.replace(problem, values=(problem.values[0], first, *problem.values[2:]))
    verify(problem, ALL, offloaded={"x1"})
    step = simulate_plan(problem, Plan(ALL))
    assert step.offloaded == {"x1"}
    assert step.peak_bytes < simulate_plan(_without_host(problem), Plan(ALL)).peak_bytes


@pytest.mark.parametrize("speeds", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_host_has_positive_speeds(speeds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Host(0, *speeds)
