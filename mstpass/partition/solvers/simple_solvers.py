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

The knapsack is solved by dynamic programming over ``_UNITS`` units of bytes, to which weights are
rounded. Worths are added as if no recomputed value needed another one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

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


_UNITS = 1024  # that the bytes of all items are divided into
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
    table = _Knapsack(items)
    for i in range(_LIMITS + 1):
        yield measured(problem, modes, table.best(_UNITS * (_LIMITS - i) // _LIMITS))


class _Knapsack:
    """The best subset of items for every limit, by dynamic programming.

    After item i, ``worth[u]`` is the most that the items up to i are worth within u units, and
    ``takes[i, u]`` says whether item i is among them.
    """

    def __init__(self, items: list[Value]):
        self.items = items
        total = max(1, sum(value.bytes for value in items))
        self.units = [round(value.bytes * _UNITS / total) for value in items]
        worth = np.zeros(_UNITS + 1)
        self.takes = np.zeros((len(items), _UNITS + 1), dtype=bool)
        for i, (value, units) in enumerate(zip(items, self.units, strict=True)):
            with_item = np.full(_UNITS + 1, -np.inf)
            with_item[units:] = worth[: _UNITS + 1 - units] + value.us
            self.takes[i] = with_item >= worth
            worth = np.maximum(worth, with_item)

    def best(self, limit: int) -> frozenset[str]:
        """Names of the items to save within a limit, in units."""
        names = []
        for i in reversed(range(len(self.items))):
            if self.takes[i, limit]:
                names.append(self.items[i].name)
                limit -= self.units[i]
        return frozenset(names)
