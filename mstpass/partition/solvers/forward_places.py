"""The narrow places of the forward, and the sets of them at which to save.

*Position* t lies just after the t-th value of the problem. The *alive* values at a position were
computed before it and are used after it. A *place* is a position where few bytes are alive: saving
the alive values there cuts the forward into *segments* that backward recomputes one at a time.

For a bound T on a segment's bytes, the cheapest set of places is a shortest path::

    vertices    the beginning of the forward, the places, the end
    edges       from a vertex to each later one, if the segment between them needs at most T bytes
    length      bytes alive at the edge's end that were not alive at its beginning

so that a value that stays alive over several places, such as one that all layers read, counts once.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from mstpass.problem.problem import CutProblem

_BOUNDS = 16  # bounds T that are tried
_NEXT_BOUND = 0.75  # of the widest segment that the last bound led to
_POSITIONS_COMPARED = 4  # on either side of a place: at none of them fewer bytes are alive


class ForwardPlaces:
    """The narrow places of a problem's forward, by position.

    Values are numbered as in ``problem.values``. A view counts as its base: while the view is used,
    the base is alive.
    """

    def __init__(self, problem: CutProblem):
        self.values = problem.values
        self._index = {value.name: i for i, value in enumerate(self.values)}
        self._base = self._bases()
        alive = self._alive(self._last_uses())
        self.places = self._narrow_places(alive)
        self._alive_at = {t: sorted(alive[t] or ()) for t in self.places}
        self._bytes_from = {t: self._suffix_sums(numbers) for t, numbers in self._alive_at.items()}
        needed = self._needed()
        sizes = (
            value.bytes if i in needed and not value.free else 0
            for i, value in enumerate(self.values)
        )
        self._needed_bytes = list(itertools.accumulate(sizes, initial=0))  # before each value

    def names_at(self, place: int) -> frozenset[str]:
        """The values to save at a place: those alive there."""
        return frozenset(self.values[i].name for i in self._alive_at[place])

    def choices(self) -> list[list[int]]:
        """Sets of places to save at: first none, then the cheapest for smaller and smaller T."""
        found: list[list[int]] = [[]]
        bound = float(self._needed_bytes[-1])
        for _ in range(_BOUNDS):
            places, widest = self._cheapest(int(bound))
            if places not in found:
                found.append(places)
            bound = min(bound, widest) * _NEXT_BOUND
            if not widest:
                break
        return found

    def about_peak_bytes(self, places: Sequence[int]) -> int:
        """The bytes that a set of places saves, and those of its widest segment."""
        path = [-1, *places, len(self.values) - 1]
        saved = sum(self._new_bytes(a, b) for a, b in itertools.pairwise(path[:-1]))
        return saved + max(self._segment_bytes(a, b) for a, b in itertools.pairwise(path))

    # ---- what is alive ---------------------------------------------------------------------------
    def _bases(self) -> list[int]:
        """For each value the one whose storage it shows: its base if it is a view, or itself.

        Inputs without bytes, such as the sizes of a symbolic view, are not candidates.
        """
        base: list[int] = []
        for i, value in enumerate(self.values):
            inputs = [self._index[name] for name in value.inputs]
            shown = [j for j in inputs if self.values[j].bytes] if len(inputs) > 1 else inputs
            unsavable = not value.savable and not value.tag
            is_view = unsavable and len(shown) == 1 and value.bytes > 0
            base.append(base[shown[0]] if is_view else i)
        return base

    def _last_uses(self) -> list[int]:
        """For each value the number of the last forward value that reads it or a view of it."""
        last = list(range(len(self.values)))
        for i, value in enumerate(self.values):
            if not value.forward:
                continue
            for name in value.inputs:
                used = self._base[self._index[name]]
                last[used] = max(last[used], i)
        return last

    def _alive(self, last_use: list[int]) -> list[frozenset[int] | None]:
        """The values alive at each position; None where one of them cannot be saved."""
        found: list[frozenset[int] | None] = []
        alive: set[int] = set()
        for i, value in enumerate(self.values):
            alive = {j for j in alive if last_use[j] > i}
            if not value.free and value.forward and last_use[i] > i:
                alive.add(i)
            savable = all(self.values[j].savable for j in alive)
            found.append(frozenset(alive) if savable else None)
        return found

    def _narrow_places(self, alive: list[frozenset[int] | None]) -> list[int]:
        """Positions at which no more bytes are alive than at those nearby."""
        sizes = [
            math.inf if numbers is None else sum(self.values[j].bytes for j in numbers)
            for numbers in alive
        ]
        return [
            t
            for t, size in enumerate(sizes)
            if 0 < size < math.inf
            and size <= min(sizes[max(0, t - _POSITIONS_COMPARED) : t + _POSITIONS_COMPARED + 1])
            and (t == 0 or alive[t] != alive[t - 1])
        ]

    def _needed(self) -> set[int]:
        """Forward values that backward reads, or that a value only backward needs is made from."""
        read = [value.needed for value in self.values]
        for i in reversed(range(len(self.values))):
            if read[i] and not self.values[i].forward:
                for name in self.values[i].inputs:
                    read[self._index[name]] = True
        return {self._base[i] for i, value in enumerate(self.values) if read[i] and value.forward}

    # ---- the shortest path -----------------------------------------------------------------------
    def _cheapest(self, bound: int) -> tuple[list[int], int]:
        """The cheapest set of places for a bound on a segment's bytes.

        A segment without a place inside it may exceed the bound: nothing can divide it.

        Returns:
            The places, and the bytes of the widest segment that has a place inside it.
        """
        start, end = -1, len(self.values) - 1
        stops = [start, *(place for place in self.places if place < end), end]
        cost: dict[int, int] = {start: 0}
        previous: dict[int, int] = {}
        for at, stop in enumerate(stops[1:], 1):
            for earlier in reversed(stops[:at]):
                divisible = earlier != stops[at - 1]
                if divisible and self._segment_bytes(earlier, stop) > bound:
                    break
                length = self._new_bytes(earlier, stop) if stop != end else 0
                if stop not in cost or cost[earlier] + length < cost[stop]:
                    cost[stop], previous[stop] = cost[earlier] + length, earlier
        path = [end]
        while path[-1] != start:
            path.append(previous[path[-1]])
        path.reverse()
        number = {stop: i for i, stop in enumerate(stops)}
        widths = (
            self._segment_bytes(a, b)
            for a, b in itertools.pairwise(path)
            if number[b] - number[a] > 1
        )
        return path[1:-1], max(widths, default=0)

    def _segment_bytes(self, start: int, stop: int) -> int:
        """Bytes of the values between two positions that backward needs."""
        return self._needed_bytes[stop + 1] - self._needed_bytes[start + 1]

    def _new_bytes(self, start: int, stop: int) -> int:
        """Bytes alive at ``stop`` that were computed after ``start``."""
        return self._bytes_from[stop][bisect.bisect_right(self._alive_at[stop], start)]

    def _suffix_sums(self, numbers: list[int]) -> list[int]:
        """For each position of a list of values, the bytes of all from there on."""
        sizes = (self.values[j].bytes for j in reversed(numbers))
        return list(itertools.accumulate(sizes, initial=0))[::-1]
