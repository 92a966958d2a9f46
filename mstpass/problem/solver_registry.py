"""Names of solvers: mstpass's own, and those that users register.

The solvers themselves are in partition/solvers/.

A user's solver may never return. It runs in a thread of its own, because a signal reaches only the
main thread, and a process of its own would need a function that can be pickled. A thread cannot be
killed: if the time is over, the thread gets an exception, which ends any loop of Python's. A call
that never comes back from C keeps its thread, but nobody waits for it, and the program ends without
it.
"""

from __future__ import annotations

import contextvars
import ctypes
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mstpass.problem.problem import CutProblem, Plan

Solver = Callable[[CutProblem, int | None], Plan]
DEFAULT_TIME_LIMIT_S = 120.0  # for one call of a user's solver; the largest recorded step needs 2 s

OWN_SOLVERS = (
    "peak_search",
    "min_cut",
    "checkpoints",
    "knapsack",
    "greedy",
    "milp",
    "save_all",
    "recompute_all",
)
registered: dict[str, Solver] = {}


def solver_names() -> tuple[str, ...]:
    """All names that the option ``solver`` accepts, ``"auto"`` included."""
    return ("auto", *OWN_SOLVERS, *registered)


def is_own(name: str) -> bool:
    """Whether the solver of that name is one of mstpass's own."""
    return name == "auto" or name in OWN_SOLVERS


def register_solver(
    name: str, solve: Solver, *, time_limit_s: float = DEFAULT_TIME_LIMIT_S
) -> None:
    """Make a solver available as ``options={"solver": name}`` and to ``mstpass bench solvers``.

    Args:
        name: an identifier that none of mstpass's own solvers has.
        solve: ``solve(problem, budget_bytes) -> Plan``. It runs in a thread of its own. Each plan
            is verified: if the function raises, or backward cannot get a value that it needs, that
            is an error under ``strict``; otherwise mstpass warns, and ``peak_search`` solves
            instead. Graphs that the solver planned are not cached on disk, because nothing tells
            when the function has changed.
        time_limit_s: how long one call may take. A solver that has needed longer has failed, and
            is not asked again until it is registered again.

    Raises:
        ValueError: the name is not an identifier, or mstpass has a solver of that name; the time
            limit is not positive.
        TypeError: ``solve`` cannot be called with a problem and a budget.
    """
    if not name.isidentifier() or name == "auto":
        raise ValueError(f"register_solver: {name!r} must be an identifier other than 'auto'")
    if is_own(name):
        raise ValueError(
            f"register_solver: {name!r} is one of mstpass's own solvers; choose another name"
        )
    if not time_limit_s > 0:
        raise ValueError(f"register_solver: time_limit_s={time_limit_s!r} must be positive")
    try:
        inspect.signature(solve).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"register_solver: {name} cannot be called as {name}(problem, budget_bytes): {error}"
        ) from None
    registered[name] = _Limited(solve, time_limit_s)


class _Limited:
    """A user's solver that has a time limit; once it has exceeded it, it is not asked again."""

    def __init__(self, solve: Solver, time_limit_s: float):
        self.solve, self.time_limit_s = solve, time_limit_s
        self._too_slow: TimeLimitError | None = None

    def __call__(self, problem: CutProblem, budget_bytes: int | None) -> Plan:
        if self._too_slow is None:
            try:
                return within(self.time_limit_s, self.solve, problem, budget_bytes)
            except TimeLimitError as error:
                self._too_slow = TimeLimitError(
                    f"{error}; register_solver(..., time_limit_s=) allows more"
                )
        raise self._too_slow


T = TypeVar("T")


class TimeLimitError(Exception):
    """A function did not return in time."""


class _Stop(BaseException):
    """Raised in the thread whose time is over; no ``except Exception`` of its holds it up."""


def within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, with the values of context variables that hold here.

    Raises:
        TimeLimitError: it did not return within ``seconds``.
    """
    call = contextvars.copy_context().run
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            if over.is_set():
                return
            results.append(call(function, *args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mstpass time limit", daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    finally:  # also if Ctrl-C ends the wait, or the start
        over.set()
        if thread.is_alive():
            _stop(thread)
    error = errors[0] if errors else None
    if isinstance(error, Exception):
        raise error
    if error is not None and not isinstance(error, _Stop):  # sys.exit() would end the program here
        raise RuntimeError(f"it raised {type(error).__name__}") from error
    if not results:
        raise TimeLimitError(f"no result within {seconds:g} s")
    return results[0]


def _stop(thread: threading.Thread) -> None:
    number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
