"""Save what is alive at the narrow places of the forward; recompute all between two of them.

At each position of the forward some values are alive: computed before it, used after it. In a
transformer that is the residual stream and little else at the places between blocks. Saving the
alive values there cuts the forward in segments; the backward recomputes one segment at a time, just
before it uses it, so that the values of only one are ever in memory::

    for each bound T on a segment's bytes:
        shortest path over the narrow places, an edge where a segment holds at most T,
        its length what is alive at its end and was not alive at its beginning
    of all these, take the one whose simulated peak is lowest

This is checkpointing at block boundaries (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174), with the boundaries found in the graph. Plans may recompute matmuls and
attention: they exchange time for memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

from mstpass.graph.memory import StepMemory
from mstpass.partition.problem import CutProblem
from mstpass.partition.simulate import step_memory, step_us
from mstpass.partition.solvers.min_cut import min_cut

_BOUNDS = 16  # values of T that are tried, in geometric steps
_NARROW = 2.0  # times the least alive bytes nearby: what counts as a narrow place
_NEARBY = 32  # positions on either side


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A saved set, and the places it comes from.

    Attributes:
        places: positions in ``problem.values``, in order, and what is alive behind each.
        saved: all of that, and what may not be recomputed.
    """

    places: dict[int, frozenset[str]]
    saved: frozenset[str]
    memory: StepMemory


def checkpoints(problem: CutProblem) -> Checkpoints:
    """The checkpoints of the lowest simulated peak; of equal ones, those that recompute least."""
    line = _Line(problem)
    tried = [_at(problem, line, stops) for stops in line.choices()]
    return min(tried, key=lambda c: (c.memory.peak_bytes, step_us(problem, c.saved)))


def _at(problem: CutProblem, line: _Line, stops: list[int]) -> Checkpoints:
    places = {stop: line.names_at(stop) for stop in stops}
    saved = complete(problem, frozenset[str]().union(*places.values()))
    return Checkpoints(places, saved, step_memory(problem, saved))


def complete(problem: CutProblem, kept: frozenset[str]) -> frozenset[str]:
    """A saved set with all of ``kept``: what that leaves open, such as a random draw's result,
    comes the cheapest way."""
    rest = tuple(
        dataclasses.replace(value, free=value.free or value.name in kept)
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
        """For a view, the value whose storage it shows."""
        base: list[int] = []
        for i, value in enumerate(self.values):
            unsavable = not value.savable and not value.tag
            view = unsavable and len(value.inputs) == 1 and value.bytes > 0
            base.append(base[self.index[value.inputs[0]]] if view else i)
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
        sizes = [None if m is None else self._bytes(m) for m in self.alive]
        places = []
        for t, size in enumerate(sizes):
            if not size:
                continue
            near = [s for s in sizes[max(0, t - _NEARBY) : t + _NEARBY + 1] if s]
            changed = t == 0 or self.alive[t] != self.alive[t - 1]
            if size <= _NARROW * min(near) and changed:
                places.append(t)
        return places

    def names_at(self, place: int) -> frozenset[str]:
        return frozenset(self.values[j].name for j in self.alive_at[place])

    def choices(self) -> list[list[int]]:
        """Places to save at, from none to all that the bounds on a segment's bytes lead to."""
        found: list[list[int]] = [[]]
        total = self.needed_bytes[-1]
        least = max(1, max((v.bytes for v in self.values if not v.free), default=1))
        bound = float(total)
        for _ in range(_BOUNDS):
            path = self._path(int(bound))
            if path is None:
                break
            stops, widest = path
            if stops not in found:
                found.append(stops)
            bound = min(bound, widest) * 0.75
            if bound < least:
                break
        return found

    def _path(self, bound: int) -> tuple[list[int], int] | None:
        """Where to save so that no segment holds more than ``bound`` bytes; the widest segment."""
        start, end = -1, len(self.values) - 1
        stops = [start, *self.places, end]
        cost: dict[int, int] = {start: 0}
        previous: dict[int, int] = {}
        for at, stop in enumerate(stops[1:], 1):
            for earlier in reversed(stops[:at]):
                if self._segment(earlier, stop) > bound:
                    break
                if earlier not in cost:
                    continue
                price = cost[earlier] + (self._new_bytes(earlier, stop) if stop != end else 0)
                if stop not in cost or price < cost[stop]:
                    cost[stop], previous[stop] = price, earlier
        if end not in cost:
            return None
        chosen: list[int] = []
        widest, stop = 0, end
        while stop != start:
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
