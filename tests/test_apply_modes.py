"""``with_modes``: the loops of the chosen modes take the place of their members."""

from __future__ import annotations

import dataclasses

import pytest

from mstpass.memory.simulate_plan import step_memory, step_us
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Loop, LoopResult, Mode, RegionModes, Value


def _chain() -> CutProblem:
    """x -> wide -> out, and gradients back."""
    values = (
        Value("x", 8, kind="input", free=True),
        Value("wide", 64, ("x",), "call", us=4.0),
        Value("out", 8, ("wide",), "call", us=4.0),
    )
    backward = (
        Value("tangent", 8, kind="input"),
        Value("dwide", 64, ("tangent", "wide"), "call", us=4.0),
        Value("dx", 8, ("dwide",), "call", us=4.0),
    )
    loops = (
        Loop("mst_loop_out", ("wide", "out"), ("x",), (LoopResult("out", 8),), 16, 8.0),
        Loop(
            "mst_loop_dx",
            ("wide", "dwide", "dx"),
            ("x", "tangent"),
            (LoopResult("dx", 8),),
            32,
            12.0,
        ),
    )
    modes = RegionModes("wide", (Mode("recompute", loops), Mode("whole")))
    return CutProblem(
        values, backward=backward, outputs=("out",), gradients=("dx",), regions=(modes,)
    )


def test_loops_take_the_place_of_their_members() -> None:
    problem = _chain()
    whole = with_modes(problem, {"wide": "whole"})
    assert [v.name for v in whole.values] == ["x", "wide", "out"]
    assert step_memory(whole, {"wide"}).peak_bytes == 64 + 8 + 64 + 8  # the caller holds "out"
    chunked = with_modes(problem, {})
    assert [v.name for v in chunked.values] == ["x", "mst_loop_out", "out"]
    assert [v.name for v in chunked.backward] == ["tangent", "mst_loop_dx", "dx"]
    assert not any(v.needed for v in chunked.values if not v.free)
    assert step_memory(chunked, frozenset()).peak_bytes == 8 + 8 + 32 + 8
    assert step_us(chunked, frozenset()) == 20.0 and step_us(whole, {"wide"}) == 16.0


def test_what_the_caller_holds_is_there_all_through_the_backward() -> None:
    """An output that also crosses is not freed after its last use; one that does not, counts."""
    chain = dataclasses.replace(_chain(), regions=(), outputs=("wide",))
    ends = [m.bytes for m in step_memory(chain, {"wide"}).backward.moments]
    assert ends == [8 + 64 + 64, 64 + 64 + 8]
    freed = dataclasses.replace(_chain(), regions=())
    ends = [m.bytes for m in step_memory(freed, {"wide"}).backward.moments]
    assert ends == [8 + 64 + 64 + 8, 64 + 8 + 8]


def test_loops_that_need_each_other_are_no_plan() -> None:
    problem = _chain()
    one = Loop("mst_loop_out", ("out",), ("dx",), (LoopResult("out", 8),), 1, 1.0)
    two = Loop("mst_loop_dx", ("dx",), ("out",), (LoopResult("dx", 8),), 1, 1.0)
    circle = dataclasses.replace(problem, regions=(RegionModes("r", (Mode("save", (one, two)),)),))
    with pytest.raises(Cycle, match="needs its own results"):
        with_modes(circle, {})


def test_a_region_knows_its_modes() -> None:
    with pytest.raises(KeyError, match="no mode 'fused', only recompute, whole"):
        with_modes(_chain(), {"wide": "fused"})
    with pytest.raises(ValueError, match="different names"):
        RegionModes("r", (Mode("save"), Mode("save")))
