"""Names of solvers: mstpass's own, and those that users register.

The solvers themselves are in partition/solvers/, one file each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mstpass.problem.problem import CutProblem, Plan

Solver = Callable[[CutProblem, int | None], Plan]

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


def register_solver(name: str, solve: Solver) -> None:
    """Make a solver available as ``options={"solver": name}`` and to ``mstpass bench solvers``.

    Args:
        name: an identifier that none of mstpass's own solvers has.
        solve: ``solve(problem, budget_bytes) -> Plan``. Each plan is verified: if backward cannot
            get a value that it needs, that is an error under ``strict``, and otherwise a warning.
            Graphs that the solver planned are not cached on disk, because nothing tells when the
            function has changed.

    Raises:
        ValueError: the name is not an identifier, or mstpass has a solver of that name.
        TypeError: ``solve`` cannot be called with a problem and a budget.
    """
    if not name.isidentifier() or name == "auto":
        raise ValueError(f"register_solver: {name!r} must be an identifier other than 'auto'")
    if is_own(name):
        raise ValueError(
            f"register_solver: {name!r} is one of mstpass's own solvers; choose another name"
        )
    try:
        inspect.signature(solve).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"register_solver: {name} cannot be called as {name}(problem, budget_bytes): {error}"
        ) from None
    registered[name] = solve
