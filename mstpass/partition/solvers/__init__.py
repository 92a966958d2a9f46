"""Solvers: ``solve(problem, budget_bytes) -> Plan``, by name.

A problem may have regions, each with several modes; ``with_modes`` closes it for those that a
solver chooses (the first of each where it says nothing), and the saved set speaks of the closed
problem's values. ``budget_bytes`` is the most that the step's simulated peak may be; None asks for
what costs next to no time, 0 for the least memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mstpass.partition.modes import with_modes
from mstpass.partition.problem import CutProblem, Plan
from mstpass.partition.solvers.checkpoints import checkpoints
from mstpass.partition.solvers.greedy import greedy
from mstpass.partition.solvers.knapsack import knapsack
from mstpass.partition.solvers.milp import milp
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.partition.solvers.trivial import recompute_all, save_all

Solver = Callable[[CutProblem, int | None], Plan]
Cut = Callable[[CutProblem], frozenset[str]]

AUTO = "peak_search"


def _of_first_modes(cut: Cut, recompute_heavy: bool) -> Solver:
    def solve(problem: CutProblem, budget_bytes: int | None) -> Plan:
        closed = with_modes(problem, {}).allowing(recompute_heavy)
        return Plan(cut(closed), {})

    return solve


_SOLVERS: dict[str, Solver] = {
    "peak_search": peak_search,
    "min_cut": _of_first_modes(min_cut, recompute_heavy=False),
    "checkpoints": _of_first_modes(
        lambda problem: checkpoints(problem).saved, recompute_heavy=True
    ),
    "knapsack": knapsack,
    "greedy": greedy,
    "milp": milp,
    "save_all": save_all,
    "recompute_all": recompute_all,
}
SOLVERS: Mapping[str, Solver] = MappingProxyType(_SOLVERS)


def is_own(name: str) -> bool:
    """Whether a solver is one of mstpass's own."""
    return name == "auto" or (name in _SOLVERS and _SOLVERS[name].__module__.startswith("mstpass."))


def register_solver(name: str, solve: Solver) -> None:
    """Make a solver available as ``options={"solver": name}`` and to ``mstpass bench solvers``.

    Args:
        solve: ``solve(problem, budget_bytes) -> Plan``. Every answer is verified; one that does not
            give the backward what it needs is an error under ``strict``, else a warning. What it
            compiles is not cached on disk: nothing says when the function has changed.

    Raises:
        ValueError: the name is taken by one of mstpass's own, or is no identifier.
        TypeError: ``solve`` cannot be called with a problem and a budget.
    """
    if not name.isidentifier() or name == "auto":
        raise ValueError(f"register_solver: {name!r} must be an identifier other than 'auto'")
    if is_own(name):
        raise ValueError(f"register_solver: {name!r} is one of mstpass's own solvers")
    try:
        inspect.signature(solve).bind(None, None)
    except TypeError as error:
        raise TypeError(f"register_solver: {name}(problem, budget_bytes): {error}") from None
    _SOLVERS[name] = solve
