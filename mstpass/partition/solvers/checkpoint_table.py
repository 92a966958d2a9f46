"""Where to save and what to recompute, by dynamic programming over the places of the forward.

*Stops* 0 to K are the beginning of the forward, its places and its end; *segment* s lies between
stops s and s + 1. Backward needs the segments from the last one to the first. With ``room`` bytes
for all but what is stored before stop a, the segments from a to b are done in one of two ways::

    unit     compute them once and keep everything, if what that needs is within the room
    split    at a stop m between them: compute from a to m, keep only what is alive at m
             the segments from m to b, in the room less what is alive at m
             the segments from a to m, in the whole room

so that ::

    T[a, b, room] = min(unit, min over m: us(a, m) + T[m, b, room - new(a, m)] + T[a, m, room])

Where b is the end, the forward itself has computed from a to m, which takes no time: these stops
are *saved*. The others are *nested*: the number of splits whose left part a stop lies in is its
level (memory/program.py). A unit may run in one of several *forms*, modes of its regions, which
need and take differently. In some forms the forward saves more of a segment than what is alive at
its ends, so that less is recomputed: these are for single segments between saved stops.

Saved stops may wait on a host. They take nothing of the room then, but of the host's own::

    T[a, end, room, host] = ... min over m: T[m, end, room, host - new(a, m)] + T[a, m, room]

This is the reversal of a chain with checkpoints of any number of levels (Griewank and Walther,
"Revolve", 2000; Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019), with what
is stored in bytes and a need of its own for each segment. The room is in cells; the table answers
for every number of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_HOST_CELLS = 64
_PRICE = 1e-6  # of all stored bytes, in units of the step's time: of equal times fewer bytes win


@dataclasses.dataclass(frozen=True)
class Form:
    """What the segments need and take with some modes of their regions. Arrays by segment.

    Attributes:
        backward_bytes: needed while its gradients are computed, besides what is alive at stops.
        forward_bytes: needed while the forward computes it, besides what is alive at stops.
        kept_bytes: what is kept of the recomputation of the segments from a on while the gradients
            of segment s are computed, for each ``[a, s]``.
        us: time of its forward, of its recomputation once, and of its backward.
        onward_us: the time to recompute the rest of it, where what is alive at its end is not
            stored.
        saved_bytes: what the forward saves of it besides what is alive at stops. Where that is any,
            there is one segment to a unit.
    """

    backward_bytes: Array
    forward_bytes: Array
    kept_bytes: Array
    us: Array
    onward_us: Array
    saved_bytes: Array

    @property
    def saves(self) -> bool:
        """Whether the forward saves more than what is alive at stops."""
        return bool(self.saved_bytes.any())


@dataclasses.dataclass(frozen=True)
class Costs:
    """A chain of segments.

    Attributes:
        forms: the forms in which a unit may run.
        forward_us: the time to compute a segment once more.
        between_bytes: what the backward holds before it begins with the segments that end at a
            stop, besides what is alive at stops; by stop.
        new_bytes: what is alive at stop m and not at stop a, for each ``[a, m]``.
        pinned_bytes: what the same takes on the host.
    """

    forms: Sequence[Form]
    forward_us: Array
    between_bytes: Array
    new_bytes: Array
    pinned_bytes: Array

    @property
    def segments(self) -> int:
        return len(self.forward_us)

    @functools.cached_property
    def forward_bytes(self) -> Array:
        """What the forward of a segment needs in its leanest form."""
        return np.min([form.forward_bytes for form in self.forms], axis=0)

    def pass_bytes(self, a: int, forward_bytes: Array) -> Array:
        """What the forward of the segments from stop a on needs besides what is stored up to it.

        There is what is alive at the beginning of each, up to the end of those.
        """
        return np.maximum.accumulate(forward_bytes[a:] + self.new_bytes[a, a:-1])

    @functools.cached_property
    def least_us(self) -> Array:
        """The time of each segment in its fastest form."""
        return np.min([form.us for form in self.forms], axis=0)

    @property
    def least_bytes(self) -> float:
        """No room is of use that is smaller than what the leanest segment needs."""
        return float(min(form.backward_bytes.min() for form in self.forms))

    @property
    def most_bytes(self) -> float:
        """Room enough without nested stops: if all of them are saved, or if none is."""
        stored = _before(np.diagonal(self.new_bytes, 1)[:-1])
        saved, whole = [], []
        for form in (form for form in self.forms if not form.saves):
            needed = np.maximum(form.backward_bytes, form.forward_bytes)
            saved.append((needed + stored).max())
            backward_bytes = (form.backward_bytes + form.kept_bytes[0]).max()
            whole.append(max(backward_bytes, self.pass_bytes(0, form.forward_bytes)[-1]))
        return float(min(*saved, *whole))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which stops are stored, and how the segments run.

    Attributes:
        levels: of each stored stop: 0 if it is saved, or its level if it is nested.
        forms: the number of each segment's form.
        room_bytes: the peak that it is made for.
        us: the time of the step.
    """

    levels: Mapping[int, int]
    forms: tuple[int, ...]
    room_bytes: float
    us: float


class _Ways:
    """For segments from a to b and each number of cells: the least time, and how to reach it.

    Attributes:
        us: infinite where there is not enough room.
        choice: the stop to split at, or -1 - the form of a unit.
        form: the form of the segment before that stop, if the forward saves more of it; else -1.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.us = np.full(shape, math.inf)
        self.choice = np.full(shape, -1, np.int16)
        self.form = np.full(shape, -1, np.int16)


class CheckpointTable:
    """The fastest placement of a chain for each room.

    Args:
        most_bytes: the largest room.
        cells: into how many cells the room between the least and the largest is divided.
    """

    def __init__(self, costs: Costs, most_bytes: float, cells: int):
        self.costs = costs
        cell = max(1.0, (most_bytes - costs.least_bytes) / cells)
        self.rooms = costs.least_bytes + cell * np.arange(cells + 1)
        self._cell_bytes = cell
        stored = max(1.0, float(costs.new_bytes[0].sum()))
        self._price = _PRICE * float(costs.least_us.sum()) / stored
        self._nested_by_levels: dict[int | None, _Ways] = {}
        self._saved_by_levels: dict[tuple[int | None, float | None], _Ways] = {}

    # ---- answers ---------------------------------------------------------------------------------
    def placements(
        self, levels: int | None = None, host_bytes: float | None = None
    ) -> list[Placement]:
        """All of them, the fastest first, each in the least room that it is possible in.

        Args:
            levels: of nested stops, at most; None: any number.
            host_bytes: of saved stops that the host holds, where they take no room; None: there is
                no host.
        """
        us = self._saved(levels, host_bytes).us[-1, 0]
        before = np.concatenate([[math.inf], us[:-1]])
        rooms = np.flatnonzero(us < before)
        return [self._placement(int(room), levels, host_bytes) for room in reversed(rooms)]

    def _placement(self, room: int, levels: int | None, host_bytes: float | None) -> Placement:
        saved = self._saved(levels, host_bytes)
        stops: dict[int, int] = {}
        forms = [0] * self.costs.segments

        stack = [(0, self.costs.segments, room, len(saved.us) - 1, 0)]
        while stack:
            a, b, left, host, level = stack.pop()
            if level:
                depth = None if levels is None else levels - level + 1
                choice = int(self._nested(depth).choice[a, b, left])
                form = -1
            else:
                choice, form = int(saved.choice[host, a, left]), int(saved.form[host, a, left])
            if choice < 0:
                forms[a:b] = [-1 - choice] * (b - a)
                continue
            stops[choice] = level
            stored_bytes = self.costs.new_bytes[a, choice]
            if form >= 0:
                forms[a] = form
                stored_bytes = stored_bytes + self.costs.forms[form].saved_bytes[a]
            else:
                stack.append((a, choice, left, host, level + 1))
            if level or host_bytes is None:
                left -= int(self._cells(stored_bytes))
            else:
                host -= int(self._host_cells(self.costs.pinned_bytes[a, choice], host_bytes))
            stack.append((choice, b, left, host, level))
        us = self.costs.least_us.sum() + saved.us[-1, 0, room]
        return Placement(stops, tuple(forms), float(self.rooms[room]), float(us))

    # ---- the table -------------------------------------------------------------------------------
    @functools.cached_property
    def _units(self) -> _Ways:
        """The segments from a to b as one unit, in the fastest form that the room allows."""
        count = self.costs.segments
        ways = _Ways((count + 1, count + 1, len(self.rooms)))
        for number, form in enumerate(self.costs.forms):
            if form.saves:
                continue
            extra_us, onward_us = _before(form.us - self.costs.least_us), _before(form.onward_us)
            for a in range(count):
                backward_bytes = form.backward_bytes[a:] + form.kept_bytes[a, a:]
                needed = np.maximum(
                    np.maximum.accumulate(backward_bytes),
                    self.costs.pass_bytes(a, form.forward_bytes),
                )
                first = np.searchsorted(self.rooms, needed)
                for b, cell in enumerate(first, a + 1):
                    us = extra_us[b] - extra_us[a] + onward_us[b - 1] - onward_us[a]
                    better = us < ways.us[a, b, cell:]
                    ways.us[a, b, cell:][better] = us
                    ways.choice[a, b, cell:][better] = -1 - number
        return ways

    @functools.cached_property
    def _pass_bytes(self) -> list[Array]:
        """From each stop on, what the forward needs in the leanest form."""
        costs = self.costs
        return [costs.pass_bytes(a, costs.forward_bytes) for a in range(costs.segments)]

    def _nested(self, levels: int | None) -> _Ways:
        """The segments from a to b before the end, with that many levels of nested stops."""
        if levels == 0:
            return self._units
        if levels not in self._nested_by_levels:
            self._nested_by_levels[levels] = self._solve_nested(levels)
        return self._nested_by_levels[levels]

    def _solve_nested(self, levels: int | None) -> _Ways:
        units = self._units
        ways = _Ways(units.us.shape)
        left = ways if levels is None else self._nested(levels - 1)
        forward_us = _before(self.costs.forward_us)
        for length in range(1, self.costs.segments):
            for a in range(self.costs.segments - length):
                b, ms = a + length, np.arange(a + 1, a + length)
                ways.us[a, b], ways.choice[a, b] = units.us[a, b], units.choice[a, b]
                if not len(ms):
                    continue
                pass_bytes = self._pass_bytes[a][: len(ms)] + self.costs.between_bytes[b]
                us = left.us[a, ms] + self._behind(ways.us[ms, b], self.costs.new_bytes[a, ms])
                us += (forward_us[ms] - forward_us[a])[:, None]
                us[self.rooms < pass_bytes[:, None]] = math.inf
                _take(ways, (a, b), us, ms)
        return ways

    def _saved(self, levels: int | None, host_bytes: float | None) -> _Ways:
        """The segments from a to the end, which the forward has computed, for each number of cells
        of the host; without a host there is one of them."""
        if (levels, host_bytes) not in self._saved_by_levels:
            self._saved_by_levels[levels, host_bytes] = self._solve_saved(levels, host_bytes)
        return self._saved_by_levels[levels, host_bytes]

    def _solve_saved(self, levels: int | None, host_bytes: float | None) -> _Ways:
        count, left = self.costs.segments, self._nested(levels)
        of_host = 0
        if host_bytes is not None and math.isfinite(host_bytes):
            of_host = int(host_bytes // self._host_cell(host_bytes))
        ways = _Ways((of_host + 1, count + 1, len(self.rooms)))
        for a, host in itertools.product(reversed(range(count)), range(of_host + 1)):
            at = (host, a)
            ways.us[at], ways.choice[at] = self._units.us[a, count], self._units.choice[a, count]
            if len(ms := np.arange(a + 1, count)):
                stored_bytes = self.costs.new_bytes[a, ms]
                if host_bytes is None:
                    us = self._behind(ways.us[0, ms], stored_bytes)
                else:
                    left_cells = host - self._host_cells(self.costs.pinned_bytes[a, ms], host_bytes)
                    us = self._behind_on_host(ways.us[:, ms], stored_bytes, left_cells)
                us += left.us[a, ms]
                us[self.rooms < self._pass_bytes[a][: len(ms), None]] = math.inf
                _take(ways, at, us, ms)
            for number, form in enumerate(self.costs.forms):
                if form.saves and host_bytes is None:
                    self._save_more(ways, a, number)
        return ways

    def _save_more(self, ways: _Ways, a: int, number: int) -> None:
        """Have segment a run in a form in which the forward saves more of it."""
        form, end = self.costs.forms[number], self.costs.segments
        us = np.full(len(self.rooms), form.us[a] - self.costs.least_us[a])
        saved_bytes = form.saved_bytes[a]
        needed = max(form.backward_bytes[a], form.forward_bytes[a])
        us[self.rooms < needed + saved_bytes] = math.inf
        if a + 1 < end:
            saved_bytes = saved_bytes + self.costs.new_bytes[a, a + 1]
            us += self._behind(ways.us[0, [a + 1]], np.array([saved_bytes]))[0]
        better = us < ways.us[0, a]
        ways.us[0, a][better] = us[better]
        ways.choice[0, a][better] = a + 1 if a + 1 < end else -1 - number
        ways.form[0, a][better] = number if a + 1 < end else -1

    def _behind(self, us: Array, stored_bytes: Array) -> Array:
        """The times of what lies behind stops, while so much is stored up to them."""
        room = np.arange(len(self.rooms)) - self._cells(stored_bytes)[:, None]
        found = np.take_along_axis(us, np.maximum(room, 0), 1)
        found[room < 0] = math.inf
        found += self._price * stored_bytes[:, None]
        return found

    def _behind_on_host(
        self, us: Array, stored_bytes: Array, left_cells: NDArray[np.int64]
    ) -> Array:
        """The same while what is stored waits on the host, of whose cells so many are left."""
        found = us[np.maximum(left_cells, 0), np.arange(len(left_cells))]
        found[left_cells < 0] = math.inf
        found += self._price * stored_bytes[:, None]
        return found

    def _cells(self, stored_bytes: Array) -> NDArray[np.int64]:
        return np.rint(stored_bytes / self._cell_bytes).astype(np.int64)

    def _host_cell(self, host_bytes: float) -> float:
        """The bytes of a cell of the host: half of what a stop takes, so that whole stops fill it.

        Larger where there would be too many.
        """
        taken = np.diagonal(self.costs.pinned_bytes, 1)[:-1]
        stop_bytes = float(np.median(taken[taken > 0])) if taken.any() else 0.0
        return max(1.0, stop_bytes / 2, host_bytes / _HOST_CELLS)

    def _host_cells(self, pinned_bytes: Array, host_bytes: float) -> NDArray[np.int64]:
        """In cells, rounded up: what exceeds the host's budget would stay on the device."""
        return np.ceil(pinned_bytes / self._host_cell(host_bytes)).astype(np.int64)


def _before(values: Array) -> Array:
    """The sums of all values before each position."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _take(ways: _Ways, at: tuple[int, ...], us: Array, ms: NDArray[np.int64]) -> None:
    """Split at the best m in each room in which that takes less time than what is known."""
    best = us.argmin(0)
    best_us = us[best, np.arange(us.shape[1])]
    better = best_us < ways.us[at]
    ways.us[at] = np.where(better, best_us, ways.us[at])
    ways.choice[at] = np.where(better, ms[best], ways.choice[at])
