"""Drop saved values one by one, the value that frees most bytes per microsecond first.

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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from mstpass.partition.solvers.choose_modes import first_modes, least_memory_mode, returned_bytes
from mstpass.partition.solvers.plan_sequence import MeasuredPlan, first_within, measured
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value

_PLANS = 32  # plans that are simulated after the first one, at most


@dataclasses.dataclass(frozen=True)
class _Move:
    """Drop the value ``name``, or put the region ``name`` in the mode ``mode``."""

    name: str
    bytes_per_us: float
    mode: str = ""


def greedy(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan of the sequence within the budget; the one of the lowest peak if none is."""
    return first_within(_sequence(problem), budget_bytes)


def _sequence(problem: CutProblem) -> Iterator[MeasuredPlan]:
    moves = _ranked_moves(problem)
    plans = min(len(moves), _PLANS)
    for count in [0, *(len(moves) * i // plans for i in range(1, plans + 1))]:
        made = moves[:count]
        dropped = {move.name for move in made if not move.mode}
        modes = {**first_modes(problem), **{move.name: move.mode for move in made if move.mode}}
        yield measured(problem, modes, _all_but(dropped))


def _all_but(dropped: set[str]) -> Callable[[Value], bool]:
    return lambda value: value.forward and value.name not in dropped


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
