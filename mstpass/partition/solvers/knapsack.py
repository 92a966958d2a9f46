"""Choose the saved values by a 0/1 knapsack: the most recomputation time under a limit on bytes.

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

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mstpass.partition.solvers.choose_modes import first_modes, least_memory_modes
from mstpass.partition.solvers.plan_sequence import MeasuredPlan, first_within, measured
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.problem.saved_set import saved_where

_UNITS = 1024  # that the bytes of all items are divided into
_LIMITS = 16  # limits that are tried for each choice of modes, beside 0


def knapsack(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan of the sequence within the budget; the one of the lowest peak if none is."""
    return first_within(_sequence(problem), budget_bytes)


def _sequence(problem: CutProblem) -> Iterator[MeasuredPlan]:
    choices = [first_modes(problem)]
    if least_memory_modes(problem) != choices[0]:
        choices.append(least_memory_modes(problem))
    for modes in choices:
        yield from _plans_by_limit(problem, modes)


def _plans_by_limit(problem: CutProblem, modes: Mapping[str, str]) -> Iterator[MeasuredPlan]:
    closed = with_modes(problem, modes)
    read = saved_where(closed, lambda value: value.forward)
    items = [value for value in closed.values if value.name in read and not value.pinned]
    table = _Knapsack(items)
    for i in range(_LIMITS + 1):
        chosen = table.best(_UNITS * (_LIMITS - i) // _LIMITS)
        yield measured(problem, modes, _among(chosen))


def _among(names: frozenset[str]) -> Callable[[Value], bool]:
    return lambda value: value.name in names


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
