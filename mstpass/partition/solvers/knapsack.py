"""Under a limit on saved bytes, save what would take longest to recompute: a 0/1 knapsack.

The values that backward reads are the items, with their bytes as weights and the time of their own
ops as worth; what is left out is recomputed. torch's ``activation_memory_budget`` is such a
knapsack (torch/_functorch/_activation_checkpointing/knapsack.py), but its budget is a share of the
saved bytes. Here the limit is lowered, by equal steps from everything to nothing, until the
*simulated peak* of the step is within the budget; then the same with each region in the mode that
keeps least.

The knapsack is solved by dynamic programming over ``_LEVELS`` units of bytes; rounding weights to
units makes it approximate. Weights are added as if no value needed another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mstpass.partition.solvers.plan_sequence import (
    Step,
    first_modes,
    first_within,
    lean_modes,
    saved_where,
    step_of,
)
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value

_LEVELS = 1024
_STEPS = 16  # limits that are tried for each choice of modes


def knapsack(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The plan of the highest limit whose peak is within the budget; the lowest where none is."""
    return first_within(_stair(problem), budget_bytes)


def _stair(problem: CutProblem) -> Iterator[Step]:
    choices = [first_modes(problem)]
    if lean_modes(problem) != choices[0]:
        choices.append(lean_modes(problem))
    for modes in choices:
        yield from _limits(problem, modes)


def _limits(problem: CutProblem, modes: Mapping[str, str]) -> Iterator[Step]:
    closed = with_modes(problem, modes)
    saved = saved_where(closed, lambda value: value.forward)
    items = [value for value in closed.values if value.name in saved and not value.pinned]
    taken = _Knapsack(items)
    for step in range(_STEPS + 1):
        names = taken.within(_LEVELS * (_STEPS - step) // _STEPS)
        yield step_of(problem, modes, _among(names))


def _among(names: frozenset[str]) -> Callable[[Value], bool]:
    return lambda value: value.name in names


class _Knapsack:
    """The best subset of items for every limit at once."""

    def __init__(self, items: list[Value]):
        self.items = items
        total = max(1, sum(value.bytes for value in items))
        self.units = [round(value.bytes * _LEVELS / total) for value in items]
        worth = np.zeros(_LEVELS + 1)
        self.takes = np.zeros((len(items), _LEVELS + 1), dtype=bool)
        for i, (value, units) in enumerate(zip(items, self.units, strict=True)):
            with_it = np.full(_LEVELS + 1, -np.inf)
            with_it[units:] = worth[: _LEVELS + 1 - units] + value.us
            self.takes[i] = with_it >= worth
            worth = np.maximum(worth, with_it)

    def within(self, limit: int) -> frozenset[str]:
        """Names of the items to save when they may weigh ``limit`` units."""
        names = []
        for i in reversed(range(len(self.items))):
            if self.takes[i, limit]:
                names.append(self.items[i].name)
                limit -= self.units[i]
        return frozenset(names)
