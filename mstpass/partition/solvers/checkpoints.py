"""Save what is alive at the narrow places of the forward; recompute all between two of them.

At each position of the forward some values are alive: computed before it, used after it. In a
transformer that is the residual stream and little else at the places between blocks. Saving the
alive values there cuts the forward in segments; the backward recomputes one segment at a time, just
before it uses it, so that the values of only one are ever in memory::

    for each bound T on a segment's bytes:
        shortest path over the narrow places, an edge where a segment holds at most T,
        its length what is alive at its end and was not alive at its beginning
    of all these, take the one whose simulated peak is lowest

    once more with *nested* places: the finest of these, saved at the places of a coarser one only,
    recomputed from there in a pass that keeps nothing else, each segment once more after it

This is checkpointing at block boundaries (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174), with the boundaries found in the graph; nested places are two levels of it
(section 4.3). Plans may recompute matmuls and attention: they exchange time for memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.problem.problem import CutProblem, is_loop
from mstpass.problem.verify import read

_BOUNDS = 16  # values of T that are tried, in geometric steps
_NEARBY = 4  # positions on either side, with no less alive than at a narrow place
_RISING = 3  # flat plans beyond the lowest that are looked at, for nested ones
_FINE = 3  # of these that nested places are taken from
_SPREAD = 2.0  # times the root of their number: how many are saved

Places = Mapping[int, frozenset[str]]  # positions, in order, and what is alive behind each


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A saved set, and the places it comes from.

    Attributes:
        places: positions in ``problem.values``, in order, and what is alive behind each.
        inner: places between them that are nested, likewise.
        saved: all of ``places``, and what may not be recomputed.
    """

    places: Places
    inner: Places
    saved: frozenset[str]
    simulation: StepSimulation

    @property
    def nested(self) -> frozenset[str]:
        return self.simulation.nested


def checkpoints(problem: CutProblem) -> Checkpoints:
    """The checkpoints of the lowest simulated peak without nested places; of equal ones, those
    that recompute least."""
    return min(itertools.chain(*problem.once(_flat)), key=_cost)


def nested_checkpoints(problem: CutProblem) -> Checkpoints | None:
    """The same with nested places; None where there are none to try.

    The places of both levels are those of two bounds on a segment's bytes.
    """
    flat = [both[0] for both in problem.once(_flat)]
    lowest = flat.index(min(flat, key=_cost))
    tried = [
        at_places(problem, coarse.places, _between(fine.places, coarse.places))
        for fine in flat[lowest:][:_FINE]
        for coarse in flat
        if 1 / _SPREAD <= len(coarse.places) / math.sqrt(len(fine.places) or 1) <= _SPREAD
    ]
    found = min(tried, key=_cost, default=None)
    return min(found, _last_saved(problem, found), key=_cost) if found is not None else None


def _last_saved(problem: CutProblem, found: Checkpoints) -> Checkpoints:
    """Without nested places behind the last other one: what backward has first it may as well
    save, if it does not begin at the peak."""
    last = max(found.places, default=-1)
    inner = {place: names for place, names in found.inner.items() if place < last}
    return at_places(problem, {**found.places, **_between(found.inner, inner)}, inner)


def _flat(problem: CutProblem) -> list[tuple[Checkpoints, Checkpoints]]:
    """Checkpoints from none to many, until more of them only raise the peak: where loops run again,
    and where none does."""
    line = _Line(problem)
    once = _with_loops_once(problem)
    found: list[tuple[Checkpoints, Checkpoints]] = []
    for stops in line.choices():
        places = {stop: line.names_at(stop) for stop in stops}
        found.append((at_places(problem, places), at_places(once, places)))
        lowest = min(range(len(found)), key=lambda i: _cost(found[i][0]))
        if lowest < len(found) - _RISING:
            break
    return found


def _with_loops_once(problem: CutProblem) -> CutProblem:
    values = (
        dataclasses.replace(value, pinned=True) if is_loop(value.name) and not value.tag else value
        for value in problem.values
    )
    return dataclasses.replace(problem, values=tuple(values))


def _between(fine: Places, coarse: Places) -> Places:
    return {place: names for place, names in fine.items() if place not in coarse}


def _cost(found: Checkpoints) -> tuple[int, float]:
    return found.simulation.peak_bytes, found.simulation.us


def at_places(problem: CutProblem, places: Places, inner: Places | None = None) -> Checkpoints:
    """Save at these places, recompute what is alive at the inner ones in passes of their own."""
    saved = read(problem, complete(problem, frozenset[str]().union(*places.values())))
    nested = frozenset[str]().union(*(inner or {}).values()) - saved
    return Checkpoints(places, inner or {}, saved, StepSimulation(problem, saved, nested))


def complete(problem: CutProblem, kept: frozenset[str]) -> frozenset[str]:
    """A saved set with all of ``kept``: what that leaves open, such as a random draw's result,
    comes the cheapest way."""
    rest = tuple(
        dataclasses.replace(value, free=True) if value.name in kept else value
        for value in problem.values
    )
    return kept | min_cut(dataclasses.replace(problem, values=rest))


class _Line:
    """The forward as a line of positions; position t lies behind value t."""

    def __init__(self, problem: CutProblem):
        self.values = problem.values
        self.index = {value.name: i for i, value in enumerate(self.values)}
        self.base = self._bases()
        self.last_use = self._last_uses()
        self.alive = self._alive()
        self.places = self._narrow_places()
        self.alive_at = {t: sorted(self.alive[t] or ()) for t in self.places}
        self.bytes_from = {t: self._suffix_sums(alive) for t, alive in self.alive_at.items()}
        needed = self._needed()
        self.needed_bytes = [0]
        for i, value in enumerate(self.values):
            size = value.bytes if i in needed and not value.free else 0
            self.needed_bytes.append(self.needed_bytes[-1] + size)

    def _needed(self) -> set[int]:
        """Forward values that backward reads, or what is computed for it alone."""
        read = [value.needed for value in self.values]
        for i in reversed(range(len(self.values))):
            if read[i] and not self.values[i].forward:
                for name in self.values[i].inputs:
                    read[self.index[name]] = True
        return {self.base[i] for i, value in enumerate(self.values) if read[i] and value.forward}

    def _bases(self) -> list[int]:
        """For a view, the value whose storage it shows; sizes that it reads have no bytes."""
        base: list[int] = []
        for i, value in enumerate(self.values):
            unsavable = not value.savable and not value.tag
            inputs = [self.index[name] for name in value.inputs]
            shown = [j for j in inputs if self.values[j].bytes] if len(inputs) > 1 else inputs
            view = unsavable and len(shown) == 1 and value.bytes > 0
            base.append(base[shown[0]] if view else i)
        return base

    def _last_uses(self) -> list[int]:
        """Of each value in the forward, its views' uses included. Views are alive as their base."""
        last = list(range(len(self.values)))
        for i, value in enumerate(self.values):
            if not value.forward:
                continue
            for name in value.inputs:
                used = self.base[self.index[name]]
                last[used] = max(last[used], i)
        return last

    def _alive(self) -> list[frozenset[int] | None]:
        """What is alive behind each value; None where something is that cannot be saved."""
        alive: list[frozenset[int] | None] = []
        now: set[int] = set()
        for i, value in enumerate(self.values):
            now = {j for j in now if self.last_use[j] > i}
            if not value.free and value.forward and self.last_use[i] > i:
                now.add(i)
            whole = all(self.values[j].savable for j in now)
            alive.append(frozenset(now) if whole else None)
        return alive

    def _bytes(self, members: frozenset[int]) -> int:
        return sum(self.values[j].bytes for j in members)

    def _narrow_places(self) -> list[int]:
        """Where no less is alive close by."""
        sizes = [math.inf if m is None else self._bytes(m) for m in self.alive]
        return [
            t
            for t, size in enumerate(sizes)
            if 0 < size < math.inf
            and size <= min(sizes[max(0, t - _NEARBY) : t + _NEARBY + 1])
            and (t == 0 or self.alive[t] != self.alive[t - 1])
        ]

    def names_at(self, place: int) -> frozenset[str]:
        return frozenset(self.values[j].name for j in self.alive_at[place])

    def choices(self) -> list[list[int]]:
        """Places to save at, from none to all that the bounds on a segment's bytes lead to."""
        found: list[list[int]] = [[]]
        bound = float(self.needed_bytes[-1])
        for _ in range(_BOUNDS):
            stops, widest = self._path(int(bound))
            if stops not in found:
                found.append(stops)
            bound = min(bound, widest) * 0.75
            if not widest:
                break
        return found

    def _path(self, bound: int) -> tuple[list[int], int]:
        """Where to save so that no segment holds more than ``bound`` bytes, but for those with no
        place inside; the widest segment that has one."""
        start, end = -1, len(self.values) - 1
        stops = [start, *(place for place in self.places if place < end), end]
        cost: dict[int, int] = {start: 0}
        previous: dict[int, int] = {}
        for at, stop in enumerate(stops[1:], 1):
            for earlier in reversed(stops[:at]):
                whole = earlier == stops[at - 1]
                if not whole and self._segment(earlier, stop) > bound:
                    break
                price = cost[earlier] + (self._new_bytes(earlier, stop) if stop != end else 0)
                if stop not in cost or price < cost[stop]:
                    cost[stop], previous[stop] = price, earlier
        chosen: list[int] = []
        widest, stop = 0, end
        at_stop = {stop: at for at, stop in enumerate(stops)}
        while stop != start:
            if at_stop[stop] - at_stop[previous[stop]] > 1:
                widest = max(widest, self._segment(previous[stop], stop))
            stop = previous[stop]
            if stop != start:
                chosen.append(stop)
        return chosen[::-1], widest

    def _segment(self, start: int, stop: int) -> int:
        """Bytes of what backward needs of the values between two positions."""
        return self.needed_bytes[stop + 1] - self.needed_bytes[start + 1]

    def _new_bytes(self, start: int, stop: int) -> int:
        """What saving at ``stop`` adds to what was saved at ``start``."""
        return self.bytes_from[stop][bisect.bisect_right(self.alive_at[stop], start)]

    def _suffix_sums(self, alive: list[int]) -> list[int]:
        """Bytes of all values from each position of the list on."""
        sizes = (self.values[j].bytes for j in reversed(alive))
        return list(itertools.accumulate(sizes, initial=0))[::-1]
