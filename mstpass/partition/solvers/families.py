"""Families of plans: a problem with fewer and with more of the loops that take time.

Such loops are those of regions that are whole until a budget asks for them: attention in groups of
heads. Searches choose each region's mode by its memory, and would take the slowest loops where
faster ones do::

    none                                      attention is whole
    those that save, and take little time     groups of a few heads keep all threads at work
    those that save                           what backward needs is kept
    all                                       attention is computed again

Each family's problem has all the modes of the one before it. Their plans begin where the free plan
ends: only the last family has the free plan itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mstpass.partition.solvers.choose_modes import mode_us, op_times
from mstpass.partition.solvers.free_plan import every_saving, free_plan
from mstpass.partition.solvers.landmark_sequence import Family
from mstpass.problem.problem import CutProblem, Mode, RegionModes

_SAVE = "save"  # modes whose backward loop reads what the forward loop kept
_SLOWER_AT_MOST = 1.2  # factor over the time of the whole region

_Taken = Callable[[RegionModes, Mode], bool]


def families(problem: CutProblem) -> tuple[Family, ...]:
    """The families of a problem, without those that are equal; that of all loops comes last."""
    us = problem.cached(op_times)

    def takes_little(region: RegionModes, mode: Mode) -> bool:
        limit_us = _SLOWER_AT_MOST * mode_us(us, region, region.modes[0])
        return _saves(region, mode) and mode_us(us, region, mode) <= limit_us

    free, savings = problem.cached(free_plan), problem.cached(every_saving)
    fewer = [_with(problem, taken) for taken in (_none, takes_little, _saves)]
    next_ones = (*fewer[1:], problem)
    different = (a for a, b in zip(fewer, next_ones, strict=True) if a.regions != b.regions)
    first = (free,) if savings is free else (free, savings)
    modes = savings.plan.modes
    return (*(Family(other, modes) for other in different), Family(problem, modes, first))


def _none(region: RegionModes, mode: Mode) -> bool:
    return False


def _saves(region: RegionModes, mode: Mode) -> bool:
    return mode.name.startswith(_SAVE)


def _with(problem: CutProblem, taken: _Taken) -> CutProblem:
    """The problem with only these loops of the regions that are whole at first."""
    regions = tuple(
        region
        if region.modes[0].loops
        else dataclasses.replace(
            region, modes=tuple(m for m in region.modes if not m.loops or taken(region, m))
        )
        for region in problem.regions
    )
    return problem if regions == problem.regions else dataclasses.replace(problem, regions=regions)
