"""Drop saved values in the order of the bytes that each frees a microsecond of recomputing it.

Starts where everything is saved that backward reads, with regions in their first modes. A move
drops one value, which backward then recomputes from what is still saved before it, or puts a region
in the mode that keeps least. Moves are made in order, the best first, and the step is simulated
again each time some have been made::

    while the simulated peak is above the budget:
        make the next moves

Values are ranked by their own op alone, as in dynamic tensor rematerialization (Kirisame et al.,
arXiv 2006.09616); what a chain of dropped values costs together is only seen when it is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from mstpass.partition.solvers.plan_sequence import (
    Step,
    first_modes,
    first_within,
    kept_bytes,
    lean_mode,
    step_of,
)
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value

_STEPS = 32  # simulations, at the most


def greedy(problem: CutProblem, budget_bytes: int | None) -> Plan:
    """The first plan of the sequence within the budget; the lowest one where none is."""
    return first_within(_stair(problem), budget_bytes)


def _stair(problem: CutProblem) -> Iterator[Step]:
    moves = _moves(problem)
    steps = min(len(moves), _STEPS)
    for made in [0, *(len(moves) * i // steps for i in range(1, steps + 1))]:
        names = {name for kind, name in moves[:made] if kind == "drop"}
        leaner = {name for kind, name in moves[:made] if kind == "lean"}
        modes = first_modes(problem)
        for region in problem.regions:
            if region.region in leaner:
                modes[region.region] = lean_mode(region).name
        yield step_of(problem, modes, _all_but(names))


def _all_but(names: set[str]) -> Callable[[Value], bool]:
    return lambda value: value.forward and value.name not in names


def _moves(problem: CutProblem) -> list[tuple[str, str]]:
    """What could be dropped or made leaner, the most bytes a microsecond first."""
    closed = with_modes(problem, first_modes(problem))
    ranked = [
        (_rate(value.bytes, value.us), "drop", value.name)
        for value in closed.values
        if value.savable and value.forward and not value.pinned and not value.free
    ]
    for region in problem.regions:
        now, lean = region.modes[0], lean_mode(region)
        if lean is not now:
            freed = max(0, kept_bytes(now) - kept_bytes(lean))
            extra_us = sum(x.us for x in lean.loops) - sum(x.us for x in now.loops)
            ranked.append((_rate(freed, extra_us), "lean", region.region))
    return [(kind, name) for _, kind, name in sorted(ranked, key=lambda row: -row[0])]


def _rate(size: int, us: float) -> float:
    return size / us if us > 0 else math.inf
