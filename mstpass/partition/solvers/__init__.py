"""Solvers: ``solve(problem, budget_bytes) -> Plan``, by name.

A problem may have regions, each with several modes; ``with_modes`` closes it for those that a
solver chooses (the first of each where it says nothing), and the saved set speaks of the closed
problem's values. ``budget_bytes`` is the most that the step's simulated peak may be; None asks for
what costs next to no time, 0 for the least memory.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping

from mstpass.partition.solvers.checkpoints import checkpoints
from mstpass.partition.solvers.greedy import greedy
from mstpass.partition.solvers.knapsack import knapsack
from mstpass.partition.solvers.milp import milp
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.partition.solvers.trivial import recompute_all, save_all
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.solver_registry import OWN_SOLVERS, Solver, registered

Cut = Callable[[CutProblem], frozenset[str]]

AUTO = "peak_search"


def _of_first_modes(cut: Cut, recompute_heavy: bool) -> Solver:
    def solve(problem: CutProblem, budget_bytes: int | None) -> Plan:
        closed = with_modes(problem, {}).allowing(recompute_heavy)
        return Plan(cut(closed), {})

    return solve


_OWN: dict[str, Solver] = {
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
assert tuple(_OWN) == OWN_SOLVERS, "solver_registry.py lists the same names"
SOLVERS: Mapping[str, Solver] = ChainMap(_OWN, registered)  # registered ones follow as they come
