"""The simple solvers, for comparison: two extreme plans, a greedy search and a knapsack.

``save_all`` saves what eager autograd saves; backward computes only views, and values that the
forward does not need. ``recompute_all`` saves only what must not be computed twice, and runs every
region in the mode that keeps the fewest bytes. It recomputes everything else from the inputs of the
step at once, so that its peak can be above that of plans which save more.

Neither solver looks at the budget.

**Greedy**: drop saved values one by one, the value that frees most bytes per microsecond first.

The sequence begins with all that backward reads saved and every region in its first mode. A *move*
drops one saved value, which backward then recomputes from the saved values before it, or puts one
region in the mode that keeps the fewest bytes. Each plan of the sequence has made some more of the
moves::

    rank the moves by bytes freed / microseconds added
    plan i = the first i/32 of the moves made, i = 0 ... 32
    take the first plan whose simulated peak is within the budget

A value is ranked by the time of its own op alone, as in dynamic tensor rematerialization (Kirisame
et al., arXiv 2006.09616). The cost of recomputing a chain of dropped values shows only in the
simulation.

**Knapsack**: choose the saved values by a 0/1 knapsack, the most recomputation time under a limit
on bytes.

The values that backward reads are the items. An item weighs its bytes and is worth the time of its
own op; items that are left out are recomputed::

    for modes in (first modes, modes of least memory):
        for limit in (100 %, ..., 0 % of the bytes of all items):
            save the items of a knapsack of that limit
    take the first of these plans whose simulated peak is within the budget

torch's ``activation_memory_budget`` is such a knapsack too
(torch/_functorch/_activation_checkpointing/knapsack.py); its budget is a share of the saved bytes,
not a peak.

The knapsack is a mixed-integer program, which is solved up to ``_GAP``. Worths are added as if no
recomputed value needed another one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from mstpass.partition.solvers.candidate import Candidate, first_within, measured
from mstpass.partition.solvers.choose_modes import (
    first_modes,
    least_memory_mode,
    least_memory_modes,
    returned_bytes,
    whole_modes,
)
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.problem.saved_set import saved_where


def save_all(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """Save every value that backward reads, without loops where a region can do without."""
    modes = whole_modes(problem)
    return Plan(saved_where(with_modes(problem, modes), lambda value: value.forward), modes)


def recompute_all(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """Save only the values that backward cannot recompute."""
    modes = least_memory_modes(problem)
    return Plan(saved_where(with_modes(problem, modes), lambda value: False), modes)


_PLANS = 32  # plans that are simulated after the first one, at most


@dataclasses.dataclass(frozen=True)
class _Move:
    """Drop the value ``name``, or put the region ``name`` in the mode ``mode``."""

    name: str
    bytes_per_us: float
    mode: str = ""


def greedy(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan of the sequence within the budget; the one of the lowest peak if none is."""
    return first_within(_by_rate(problem), budget_bytes)


def _by_rate(problem: CutProblem) -> Iterator[Candidate]:
    moves = _ranked_moves(problem)
    plans = min(len(moves), _PLANS)
    for count in [0, *(len(moves) * i // plans for i in range(1, plans + 1))]:
        made = moves[:count]
        dropped = {move.name for move in made if not move.mode}
        modes = {**first_modes(problem), **{move.name: move.mode for move in made if move.mode}}
        kept = {v.name for v in with_modes(problem, modes).values if v.forward} - dropped
        yield measured(problem, modes, kept)


def _ranked_moves(problem: CutProblem) -> list[_Move]:
    closed = with_modes(problem, first_modes(problem))
    moves = [
        _Move(value.name, _rate(value.bytes, value.us))
        for value in closed.values
        if value.savable and value.forward and not value.pinned and not value.free
    ]
    for region in problem.regions:
        first, least = region.modes[0], least_memory_mode(region)
        if least is not first:
            freed_bytes = max(0, returned_bytes(first) - returned_bytes(least))
            added_us = sum(x.us for x in least.loops) - sum(x.us for x in first.loops)
            moves.append(_Move(region.region, _rate(freed_bytes, added_us), least.name))
    return sorted(moves, key=lambda move: -move.bytes_per_us)


def _rate(freed_bytes: int, added_us: float) -> float:
    return freed_bytes / added_us if added_us > 0 else math.inf


_GAP = 1e-3  # of the worth, by which a knapsack may miss the best one
_LIMITS = 16  # limits that are tried for each choice of modes, beside 0


def knapsack(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan of the sequence within the budget; the one of the lowest peak if none is."""
    return first_within(_by_limits(problem), budget_bytes)


def _by_limits(problem: CutProblem) -> Iterator[Candidate]:
    choices = [first_modes(problem)]
    if least_memory_modes(problem) != choices[0]:
        choices.append(least_memory_modes(problem))
    for modes in choices:
        yield from _plans_by_limit(problem, modes)


def _plans_by_limit(problem: CutProblem, modes: Mapping[str, str]) -> Iterator[Candidate]:
    closed = with_modes(problem, modes)
    read = saved_where(closed, lambda value: value.forward)
    items = [value for value in closed.values if value.name in read and not value.pinned]
    for i in reversed(range(_LIMITS + 1)):
        yield measured(problem, modes, _most_worth(items, i / _LIMITS))


def _most_worth(items: Sequence[Value], share: float) -> frozenset[str]:
    """Names of the items that are worth most within a share of the bytes of all."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not items:
        return frozenset()
    total_bytes = max(1, sum(value.bytes for value in items))
    weights, worths = ([v.bytes / total_bytes for v in items], [-v.us for v in items])
    how = {"mip_rel_gap": _GAP}
    within = LinearConstraint([weights], ub=share)
    found = milp(worths, integrality=1, bounds=Bounds(0, 1), constraints=within, options=how).x
    return frozenset(v.name for v, taken in zip(items, found, strict=True) if taken > 0.5)
