"""Simple choices of a mode for every region, by what the modes keep in memory.

``peak_search`` begins with the first modes and goes on to those that keep fewer bytes, as far as
the budget asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mstpass.problem.problem import CutProblem, Mode, RegionModes


def first_modes(problem: CutProblem) -> dict[str, str]:
    """The first mode of each region, by the region's name."""
    return {region.region: region.modes[0].name for region in problem.regions}


def whole_modes(problem: CutProblem) -> dict[str, str]:
    """The mode without loops of each region that has one; the first mode of any other."""
    return {
        region.region: min(region.modes, key=lambda mode: bool(mode.loops)).name
        for region in problem.regions
    }


def first_loops(problem: CutProblem) -> dict[str, str]:
    """Of each region that is whole at first, the first mode with loops."""
    return {
        region.region: next(mode.name for mode in region.modes if mode.loops)
        for region in problem.regions
        if not region.modes[0].loops and any(mode.loops for mode in region.modes)
    }


def fewest_bytes_modes(problem: CutProblem) -> dict[str, str]:
    """Of each region the mode whose loops return the fewest bytes."""
    return {region.region: min(region.modes, key=_returned).name for region in problem.regions}


def least_memory_modes(problem: CutProblem) -> dict[str, str]:
    """Of each region the mode that ``least_memory_mode`` chooses."""
    return {region.region: least_memory_mode(region).name for region in problem.regions}


def least_memory_mode(region: RegionModes) -> Mode:
    """The mode whose loops return the fewest bytes; of equal ones, that of the smallest chunks."""
    return min(region.modes, key=_returned_and_inner)


def returned_bytes(mode: Mode) -> int:
    """Bytes of all that the loops of a mode return."""
    return sum(result.bytes for loop in mode.loops for result in loop.results)


def op_times(problem: CutProblem) -> dict[str, float]:
    """The time of each op in microseconds, by its name."""
    return {value.name: value.us for value in (*problem.values, *problem.backward)}


def mode_us(us: Mapping[str, float], region: RegionModes, mode: Mode) -> float:
    """Time of a region: its loops, and the members that only loops of other modes compute."""
    inside = {name for loop in mode.loops for name in loop.members}
    every = {n for other in region.modes for loop in other.loops for n in loop.members}
    return sum(loop.us for loop in mode.loops) + sum(us[name] for name in every - inside)


def _returned(mode: Mode) -> tuple[bool, int]:
    return not mode.loops, returned_bytes(mode)


def _returned_and_inner(mode: Mode) -> tuple[bool, int, int]:
    inner_bytes = max((loop.inner_bytes for loop in mode.loops), default=0)
    return *_returned(mode), inner_bytes
