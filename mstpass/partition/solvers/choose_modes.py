"""Simple choices of a mode for every region, by what the modes keep in memory.

Modes are *alike* if their loops compute the same: they differ in the number of chunks, or in the
dtype of sums over chunks. With narrower sums a mode returns fewer bytes, but its chunks may need
more: a mode is *outdone* by one that is alike, returns more and holds less while it runs.

``peak_search`` begins with the first modes and goes on to those that keep fewer bytes, as far as
the budget asks for it.

*Forms* are choices for all regions that differ in the loops that they take. Some loops take time:
those of regions that are whole until a budget asks for them, attention in groups of heads; those of
blocks, in the place of an MLP's own; and those of heads in mixed mode, which compute the logits
twice. By memory alone every region would get the slowest loops, where faster ones do::

    none                                      attention is whole
    none, and no mixed mode                   the same
    those that save, and take little time     groups of a few heads keep all threads at work
    those that save                           what backward needs is kept
    all but mixed regions                     attention is computed again
    all
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from mstpass.problem.problem import MIXED, SAVE, CutProblem, Mode, RegionModes

_HARDLY_SLOWER = 1.01  # factor of time
_HARDLY_MORE = 1.02  # factor of bytes
_CAST = 2  # sums in float32 are cast to 16 bits
_SLOWER_AT_MOST = 1.2  # factor over the time of the whole region


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
    """Of each region whose attention is whole at first, the first mode with loops of attention."""
    return {
        region.region: _widest(region)[0].name
        for region in problem.regions
        if region.modes[0] not in _widest(region)
    }


def fewest_bytes_modes(problem: CutProblem) -> dict[str, str]:
    """Of each region the mode whose loops return the fewest bytes."""
    return {r.region: min(_not_outdone(r), key=_returned).name for r in problem.regions}


def least_memory_modes(problem: CutProblem) -> dict[str, str]:
    """Of each region the mode that ``least_memory_mode`` chooses."""
    return {region.region: least_memory_mode(region).name for region in problem.regions}


def least_memory_mode(region: RegionModes) -> Mode:
    """The mode whose loops leave the fewest bytes behind; of those that hardly differ in that, the
    one that holds the fewest while it runs."""
    with_loops = _widest(region)
    limit_bytes = _HARDLY_MORE * min(map(_left_bytes, with_loops))
    near = [mode for mode in with_loops if _left_bytes(mode) <= limit_bytes]
    return min(near, key=lambda mode: (held_bytes(mode), returned_bytes(mode)))


def forms(problem: CutProblem) -> list[dict[str, str]]:
    """The different choices: of the modes with the loops above, those of least memory and fast
    ones; the ones with all loops come last."""
    us = problem.cached(op_times)

    def takes_little(region: RegionModes, mode: Mode) -> bool:
        limit_us = _SLOWER_AT_MOST * mode_us(us, region, region.modes[0])
        is_fast = mode_us(us, region, mode) <= limit_us
        return _has_none(region, mode) or (is_fast and saves(region, mode))

    def saves(region: RegionModes, mode: Mode) -> bool:
        return _has_none(region, mode) or mode.kind == SAVE

    def no_mixed(region: RegionModes, mode: Mode) -> bool:
        return mode.kind != MIXED

    def fewer(region: RegionModes, mode: Mode) -> bool:
        return no_mixed(region, mode) and _has_none(region, mode)

    found: list[dict[str, str]] = []
    for taken in (_has_none, fewer, takes_little, saves, no_mixed, lambda *_: True):
        regions = [_only(region, taken) for region in problem.regions]
        least = {region.region: least_memory_mode(region).name for region in regions}
        fast = ((region.region, fast_loops(us, region)) for region in regions)
        found += (least, {**least, **{name: mode.name for name, mode in fast if mode}})
    return [form for i, form in enumerate(found) if form not in found[i + 1 :]]


def _has_none(region: RegionModes, mode: Mode) -> bool:
    """Whether the mode has none of the loops that take time."""
    return not mode.loops or (bool(region.modes[0].loops) and not mode.wide)


def _only(region: RegionModes, taken: Callable[[RegionModes, Mode], bool]) -> RegionModes:
    """The region with these of its modes; with all, if it would have none."""
    modes = tuple(mode for mode in region.modes if taken(region, mode))
    return dataclasses.replace(region, modes=modes) if modes else region


def with_narrower_sums(problem: CutProblem) -> dict[str, str]:
    """Of some regions a mode that is better than their first one, by the region's name.

    It is alike, returns fewer bytes, holds fewer while it runs, and takes no more time.
    """
    us = problem.cached(op_times)
    better: dict[str, str] = {}
    for region in problem.regions:
        first = region.modes[0]
        most_us = mode_us(us, region, first)
        alike = [
            mode
            for mode in region.modes
            if _returns_fewer(mode, first)
            and held_bytes(mode) < held_bytes(first)
            and mode_us(us, region, mode) <= most_us
        ]
        if alike:
            better[region.region] = min(alike, key=held_bytes).name
    return better


def fast_loops(us: Mapping[str, float], region: RegionModes) -> Mode | None:
    """Of the modes with loops that are hardly slower than the fastest, the one that holds least."""
    times = {mode.name: mode_us(us, region, mode) for mode in region.modes if mode.loops}
    limit_us = _HARDLY_SLOWER * min(times.values(), default=0.0)
    near = (mode for mode in region.modes if times.get(mode.name, math.inf) <= limit_us)
    return min(near, key=held_bytes, default=None)


def returned_bytes(mode: Mode) -> int:
    """Bytes of all that the loops of a mode return."""
    return sum(result.bytes for loop in mode.loops for result in loop.results)


def held_bytes(mode: Mode) -> int:
    """Bytes of what a loop of the mode returns and one chunk needs, of the loop with the most."""
    held = (loop.inner_bytes + sum(r.bytes for r in loop.results) for loop in mode.loops)
    return max(held, default=0)


def op_times(problem: CutProblem) -> dict[str, float]:
    """The time of each op in microseconds, by its name."""
    return {value.name: value.us for value in (*problem.values, *problem.backward)}


def mode_us(us: Mapping[str, float], region: RegionModes, mode: Mode) -> float:
    """Time of a region: its loops, and the members that only loops of other modes compute."""
    inside = {name for loop in mode.loops for name in loop.members}
    every = {n for other in region.modes for loop in other.loops for n in loop.members}
    return sum(loop.us for loop in mode.loops) + sum(us[name] for name in every - inside)


def _returns_fewer(mode: Mode, other: Mode) -> bool:
    """Whether modes are alike, and the first returns fewer bytes."""
    is_alike = [x.members for x in mode.loops] == [x.members for x in other.loops]
    return is_alike and returned_bytes(mode) < returned_bytes(other)


def _outdoes(mode: Mode, other: Mode) -> bool:
    return _returns_fewer(other, mode) and held_bytes(mode) < held_bytes(other)


def _widest(region: RegionModes) -> list[Mode]:
    """The modes with loops of attention; else those with loops; else all.

    What the others leave whole is not among what they return.
    """
    with_loops = [mode for mode in region.modes if mode.loops] or list(region.modes)
    return [mode for mode in with_loops if mode.wide] or with_loops


def _not_outdone(region: RegionModes) -> list[Mode]:
    """The modes that none outdoes."""
    modes = _widest(region) if any(mode.wide for mode in region.modes) else region.modes
    return [m for m in modes if not any(_outdoes(other, m) for other in modes)]


def _returned(mode: Mode) -> tuple[bool, int]:
    return not mode.loops, returned_bytes(mode)


def _left_bytes(mode: Mode) -> int:
    """Bytes of what the loops of a mode return, in the dtypes that they are cast to."""
    results = (result for loop in mode.loops for result in loop.results)
    return sum(result.bytes // (_CAST if result.cast else 1) for result in results)
