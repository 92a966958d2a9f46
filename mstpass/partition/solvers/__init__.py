"""Solvers: which mode each region runs in, and which values cross from forward to backward.

A solver is a function ``solve(problem, budget_bytes) -> Plan``. ``budget_bytes`` is the most that
the step's simulated peak may be; None asks for the plan that costs next to no time, 0 for the least
memory. A problem may have regions with several modes. ``with_modes`` puts the loops of the chosen
modes in place (the first mode of a region that the plan does not name), and the plan's saved set
names values of the problem that results.

``SOLVERS`` has all solvers by name, registered ones included. Their files:

    peak_search   the default: the least extra time within a budget on the peak
        sequence.py                         plans that it walks over, from the fastest
        free_plan.py                        the first one
        checkpoint_plans.py                 checkpoints on several levels, forms of segments mixed
        offload.py, least_host_memory.py    with saved values on the host
        spend_slack.py                      time for the part of a budget that a plan leaves
    min_cut       the fewest saved bytes                        on a network that is reduced first
    checkpoints   what is alive at narrow places of the forward
        segment_costs.py                    what the segments between them need and take
        checkpoint_table.py                 the placements, by dynamic programming
    milp          the proven optimum       (milp_model.py: the program)
    knapsack, greedy, save_all, recompute_all     simple_solvers.py, for comparison
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping

from mstpass.partition.solvers.checkpoints import checkpoints
from mstpass.partition.solvers.milp import milp
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.partition.solvers.simple_solvers import greedy, knapsack, recompute_all, save_all
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.solver_registry import OWN_SOLVERS, Solver, registered

AUTO = "peak_search"  # the solver that ``solver="auto"`` stands for


def _in_first_modes(
    choose_saved: Callable[[CutProblem], frozenset[str]], recompute_heavy: bool
) -> Solver:
    """A solver that runs each region in its first mode and does not look at the budget."""

    def solve(problem: CutProblem, budget_bytes: int | None) -> Plan:
        closed = with_modes(problem, {}).allowing(recompute_heavy)
        return Plan(choose_saved(closed), {})

    return solve


_OWN: dict[str, Solver] = {
    "peak_search": peak_search,
    "min_cut": _in_first_modes(min_cut, recompute_heavy=False),
    "checkpoints": _in_first_modes(
        lambda problem: checkpoints(problem).plan.saved, recompute_heavy=True
    ),
    "knapsack": knapsack,
    "greedy": greedy,
    "milp": milp,
    "save_all": save_all,
    "recompute_all": recompute_all,
}
assert tuple(_OWN) == OWN_SOLVERS, "problem/solver_registry.py lists the same names"
SOLVERS: Mapping[str, Solver] = ChainMap(_OWN, registered)  # shows later registrations too
