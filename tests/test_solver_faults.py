"""A user's solver that raises, returns nonsense or never returns: another one solves instead."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mstpass
from mstpass.bench import problems
from mstpass.limit import Limit
from mstpass.options import Options
from mstpass.partition.solve import solve
from mstpass.partition.solvers import SOLVERS
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.problem.saved_set import InvalidPlan, verify
from mstpass.problem.solver_registry import TimeLimitError, registered, within
from tests.checks import op_by_op
from tests.test_faults import told_by_a_right_step

PROBLEM = problems.load("head")
RIGHT = SOLVERS["peak_search"](PROBLEM, None)
Answer = Callable[[CutProblem, int | None], Any]


@pytest.fixture(autouse=True)
def _users_solvers_go() -> Iterator[None]:
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


def _raises(error: BaseException) -> Answer:
    def solve(problem: CutProblem, budget_bytes: int | None) -> Any:
        raise error

    return solve


def _changed(**fields: Any) -> Answer:
    """A right plan but for some fields."""
    return lambda problem, _: dataclasses.replace(SOLVERS["peak_search"](problem, None), **fields)


ANSWERS: dict[str, tuple[Answer, str]] = {
    "nothing": (lambda *_: None, "it returned None, which is no Plan"),
    "a text": (lambda *_: "save all", "it returned 'save all', which is no Plan"),
    "a class": (lambda *_: Plan, "which is no Plan"),
    "a list": (_changed(saved=["x"]), r"Plan.saved is \['x'\], which is no set of names"),
    "letters": (_changed(saved="abc"), "Plan.saved is 'abc', which is no set"),
    "numbers": (_changed(saved={1, 2}), r"Plan.saved is \{1, 2\}, which is no set of names"),
    "no levels": (
        _changed(nested={"x"}),
        r"Plan.nested is \{'x'\}, which is no mapping from names",
    ),
    "level 0": (_changed(nested={"x": 0}), r"which is no mapping from names to levels from 1 on"),
    "NaN": (_changed(nested={math.nan: 1}), r"Plan.nested is \{nan: 1\}, which is no mapping"),
    "unknown names": (_changed(saved=RIGHT.saved | {"nowhere"}), "does not have: .'nowhere'"),
    "unknown nested": (_changed(nested={"nowhere": 1}), "nested values .* does not have"),
    "modes": (_changed(modes=("fused",)), "Plan.modes is .* which is no mapping"),
    "a region": (_changed(modes={"nowhere": "fused"}), "no region 'nowhere'"),
    "a mode": (
        lambda problem, _: Plan(frozenset(), {r.region: "sideways" for r in problem.regions}),
        "with a mode 'sideways'",
    ),
    "NaN as a mode": (
        lambda problem, _: Plan(frozenset(), {r.region: math.nan for r in problem.regions}),
        "with a mode nan",
    ),
    "nothing saved": (lambda *_: Plan(frozenset()), "backward needs"),
    "an error": (_raises(ValueError("on purpose")), "ValueError: on purpose"),
    "no memory": (_raises(MemoryError()), "MemoryError"),
    "too deep": (_raises(RecursionError("too deep")), "RecursionError"),
    "the end": (_raises(SystemExit(3)), "it raised SystemExit"),
}


@pytest.mark.parametrize("budget", ["free", 0.0, 0.5])
@pytest.mark.parametrize("name", ANSWERS)
def test_nonsense_is_refused(name: str, budget: str | float) -> None:
    """In the place of the plan there is one of peak_search, for the same budget."""
    answer, reason = ANSWERS[name]
    mstpass.register_solver("users", answer)
    options = Options(solver="users", memory_budget=budget)
    with pytest.warns(UserWarning, match=reason) as told:
        plan, solver, notes, _ = solve(PROBLEM, options, Limit.of(options), "")
    assert len(told) == 1 and "solver 'users' failed" in str(told[0].message)
    assert solver == "peak_search" and "peak_search solves instead" in notes[0]
    auto = dataclasses.replace(options, solver="auto")
    assert plan == solve(PROBLEM, auto, Limit.of(auto), "")[0]
    with pytest.raises(InvalidPlan, match=reason):
        solve(
            PROBLEM,
            dataclasses.replace(options, strict=True),
            Limit.of(dataclasses.replace(options, strict=True)),
            "",
        )


def test_a_right_plan_is_taken_as_it_is() -> None:
    mstpass.register_solver("users", lambda problem, _: RIGHT)
    plan, solver, notes, _ = solve(
        PROBLEM, Options(solver="users"), Limit.of(Options(solver="users")), ""
    )
    assert (plan, solver, notes) == (RIGHT, "users", ())


def test_if_our_own_solver_fails_the_simplest_one_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: CutProblem, budget_bytes: int | None) -> Plan:
        raise ZeroDivisionError("on purpose")

    from mstpass.partition import solvers

    monkeypatch.setitem(solvers._OWN, "peak_search", fails)
    with pytest.warns(UserWarning, match="'peak_search' failed: .* min_cut solves instead"):
        _, solver, *_ = solve(PROBLEM, Options(), Limit.of(Options()), "")
    assert solver == "min_cut"


def test_a_failure_on_a_graph_that_torch_splits_is_told_too() -> None:
    """But for a graph that has no valid plan: there only the modes count."""
    mstpass.register_solver("users", ANSWERS["an error"][0])
    options = Options(solver="users")
    with pytest.warns(UserWarning, match="on purpose"):
        plan, solver, (note,), _ = solve(PROBLEM, options, Limit.of(options), "a reason")
    assert (plan, solver) == (RIGHT, "peak_search") and "on purpose" in note
    with pytest.raises(InvalidPlan, match="on purpose"):
        solve(
            PROBLEM,
            dataclasses.replace(options, strict=True),
            Limit.of(dataclasses.replace(options, strict=True)),
            "a reason",
        )
    lost = Value("lost", 8, ("x",), pinned=True, savable=False, needed=True)
    none = CutProblem(
        values=(_CHAIN.values[0], lost),
        backward=(Value("gradient", 8, ("lost",)),),
        outputs=("x",),
        gradients=("gradient",),
    )
    strict = Options(strict=True)
    plan, _, (note,), _ = solve(none, strict, Limit.of(strict), "a reason")
    assert plan == Plan(frozenset()) and "each region runs in its first mode" in note


# ---- the plan for the graph with its loops -----------------------------------------------------
_CHAIN = CutProblem(
    values=(
        Value("x", 8, free=True),
        Value("a", 800, ("x",), us=1.0),
        Value("b", 800, ("a",), us=1.0, needed=True),
    ),
    backward=(Value("tangent", 8), Value("gradient", 8, ("b", "tangent"))),
    outputs=("b",),
    gradients=("gradient",),
)


def test_what_backward_does_not_read_is_not_saved() -> None:
    mstpass.register_solver("users", lambda problem, budget: Plan(frozenset({"a", "b"})))
    made = solve(_CHAIN, Options(solver="users"), Limit(), "")
    assert made.plan.saved == {"b"}


def test_gradients_are_right_whatever_a_solver_says() -> None:
    """In the compiled step, with one warning and a note in the report."""
    mstpass.register_solver("users", ANSWERS["letters"][0])
    with op_by_op():
        (told,) = set(told_by_a_right_step(solver="users"))
        assert "solver 'users' failed" in told
        report = mstpass.reports()[-1]
        assert len(report.regions) == 2 and "peak_search solves instead" in report.outcome.notes[0]
        with pytest.raises(Exception, match="solver 'users' failed"):
            told_by_a_right_step(solver="users", strict=True)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_right_under_any_valid_plan(seed: int) -> None:
    """Plans that no solver of ours would make: chance says what is saved or computed ahead."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Plan] = []

    def draw(likely: float) -> bool:
        return float(torch.rand((), generator=generator)) < likely

    def solve(problem: CutProblem, budget_bytes: int | None) -> Plan:
        modes = {r.region: r.modes[-1 if draw(0.5) else 0].name for r in problem.regions}
        closed = with_modes(problem, modes).allowing(True)
        for likely in (0.3, 0.7, 1.0):
            saved = {v.name for v in closed.values if v.savable and not v.free and draw(likely)}
            nested = {
                v.name: 1 + draw(0.5) for v in closed.values if draw(0.3) and v.name not in saved
            }
            try:
                verify(closed, saved, nested)
            except InvalidPlan:
                continue
            made.append(Plan(frozenset(saved), modes, nested))
            return made[-1]
        raise AssertionError("saving all is valid")

    mstpass.register_solver("chance", solve)
    with op_by_op():
        assert told_by_a_right_step(solver="chance", strict=True) == []
    assert made


# ---- a solver that never returns -----------------------------------------------------------------
def _endless(*_: Any) -> Any:
    while True:
        with contextlib.suppress(Exception):
            math.sqrt(2)


def test_a_solver_that_never_returns_is_stopped() -> None:
    mstpass.register_solver("users", _endless, time_limit_s=0.2)
    start = time.monotonic()
    options = Options(solver="users", memory_budget=0.5)  # asks more than once
    with pytest.warns(UserWarning, match=r"no result within 0\.2 s; register.*allows more"):
        _, solver, *_ = solve(PROBLEM, options, Limit.of(options), "")
    assert solver == "peak_search" and time.monotonic() - start < 20
    _no_thread_is_left()
    start = time.monotonic()
    with pytest.raises(InvalidPlan, match=r"no result within 0\.2 s"):
        solve(
            PROBLEM,
            dataclasses.replace(options, strict=True),
            Limit.of(dataclasses.replace(options, strict=True)),
            "",
        )
    assert time.monotonic() - start < 0.2, "it is not asked again"
    mstpass.register_solver("users", lambda *_: RIGHT, time_limit_s=0.2)
    assert (
        solve(PROBLEM, Options(solver="users"), Limit.of(Options(solver="users")), "")[1] == "users"
    )


def _no_thread_is_left() -> None:
    deadline = time.monotonic() + 10
    while any(t.name == "mstpass time limit" for t in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_who_hangs_outside_of_python_is_left_behind() -> None:
    if sys.gettrace() is not None and sys.version_info < (3, 12):
        pytest.skip("Python 3.11 never ends where a tracer sees another thread's pending exception")
    end = threading.Event()
    with pytest.raises(TimeLimitError):
        within(0.1, end.wait)
    end.set()
    _no_thread_is_left()


def test_from_any_thread() -> None:
    """A signal would reach the main thread alone."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            within(0.1, _endless)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert [type(error) for error in found] == [TimeLimitError]
    _no_thread_is_left()


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_time_limit_is_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="time_limit_s"):
        mstpass.register_solver("users", lambda *_: RIGHT, time_limit_s=limit)


def test_a_solver_sees_the_settings_of_who_asks() -> None:
    import contextvars

    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(3)
    assert within(10, variable.get) == 3
