"""Families of plans: a problem with fewer and with more of the loops that take time.

Such loops are those of regions that are whole until a budget asks for them, attention in groups of
heads; those of blocks, in the place of an MLP's own; and those of heads in mixed mode, which
compute the logits twice. Searches choose each region's mode by its memory, and would take the
slowest loops where faster ones do::

    none                                      attention is whole
    none, and no mixed mode                   the same
    those that save, and take little time     groups of a few heads keep all threads at work
    those that save                           what backward needs is kept
    all but mixed regions                     attention is computed again
    all

Their plans begin where the free plan ends: only the last two families have the free plan itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mstpass.partition.solvers.choose_modes import mode_us, op_times
from mstpass.partition.solvers.free_plan import every_saving
from mstpass.partition.solvers.landmark_sequence import Family
from mstpass.problem.problem import MIXED, SAVE, CutProblem, Mode, RegionModes

_SLOWER_AT_MOST = 1.2  # factor over the time of the whole region

_Taken = Callable[[RegionModes, Mode], bool]


def families(problem: CutProblem) -> tuple[Family, ...]:
    """The families of a problem, without those that are equal; that of all loops comes last."""
    us = problem.cached(op_times)

    def takes_little(region: RegionModes, mode: Mode) -> bool:
        limit_us = _SLOWER_AT_MOST * mode_us(us, region, region.modes[0])
        return _saves(region, mode) and mode_us(us, region, mode) <= limit_us

    faster = _without_mixed(problem)
    saving = (_with(problem, taken) for taken in (takes_little, _saves))
    fewer = (_with(problem, _none), _with(faster, _none), *saving)
    last = {each.regions: each for each in (faster, problem)}
    different = {each.regions: each for each in fewer if each.regions not in last}
    modes = problem.cached(every_saving).plan.modes
    return (
        *(Family(each, modes) for each in different.values()),
        *(Family(each, modes, problem) for each in last.values()),
    )


def _none(region: RegionModes, mode: Mode) -> bool:
    return False


def _saves(region: RegionModes, mode: Mode) -> bool:
    return mode.kind == SAVE


def _without_mixed(problem: CutProblem) -> CutProblem:
    """The problem without mixed modes, where a region has others."""
    return _with_modes(problem, lambda _, mode: mode.kind != MIXED)


def _with_modes(problem: CutProblem, taken: _Taken) -> CutProblem:
    """The problem with these modes of each region; a region keeps all if it would have none."""
    regions = tuple(
        dataclasses.replace(region, modes=tuple(m for m in region.modes if taken(region, m)))
        if any(taken(region, mode) for mode in region.modes)
        else region
        for region in problem.regions
    )
    return problem if regions == problem.regions else dataclasses.replace(problem, regions=regions)


def _with(problem: CutProblem, taken: _Taken) -> CutProblem:
    """The problem with only these loops of attention."""

    def kept(region: RegionModes, mode: Mode) -> bool:
        has_none = not mode.loops or (bool(region.modes[0].loops) and not mode.wide)
        return has_none or taken(region, mode)

    return _with_modes(problem, kept)
