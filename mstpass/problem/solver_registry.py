"""Names of solvers: mstpass's own, and those that users register.

The solvers themselves are in partition/solvers/, one file each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.time_limit import TimeLimitError, within

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
