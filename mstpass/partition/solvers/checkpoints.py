"""Save what is alive at narrow places of the forward, and recompute all values between two of them.

In a transformer the narrow places lie between blocks, where little more than the residual stream is
alive. Saving the alive values there cuts the forward into segments. Backward recomputes a segment
just before it needs it, so that the other values of only one segment are in memory at a time. This
is checkpointing at block boundaries (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv 1604.06174), with boundaries found in the graph.

Which places are saved, which are recomputed ahead of time from those before them (*nested*
checkpoints, of any number of levels), and which are not kept is found for each room at once::

    places = the narrow places                                           (``ForwardPlaces``)
    costs = what the segments between them need and take                 (segment_costs.py)
    placements = the fastest for each room, by dynamic programming       (checkpoint_table.py)

Such plans may repeat matmuls and attention: they pay time for memory.

*Position* t lies just after the t-th value of the problem. The *alive* values at a position were
computed before it and are used after it. A *place* is a position where few bytes are alive: saving
the alive values there cuts the forward into *segments* that backward recomputes one at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from mstpass.partition.solvers.candidate import Candidate
from mstpass.partition.solvers.checkpoint_table import CheckpointTable, Costs, Placement
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.segment_costs import segment_costs
from mstpass.problem.names import is_loop
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.saved_set import read_by_backward, recomputed_heavy_ops

_TRIED = 4  # placements of the least room that are simulated: their order is that of estimates
_FIRST = 3  # first stops without which the best of them is simulated as well
_COARSE, _FINE = 256, 512  # cells of a table
_ROUNDED = 1.2  # what is alive at stops takes whole cells


class Chain:
    """The forward as a chain of segments, with the modes of one or several problems.

    Args:
        problems: of one step, each with other modes chosen.
        more: of each problem, sets of values that the forward may save besides.

    Attributes:
        places: where values may be saved: the values alive there.
        forms: of each form of a segment (checkpoint_table.py) the number of its problem, and what
            more the forward saves of each segment.
    """

    def __init__(
        self, problems: Sequence[CutProblem], more: Sequence[Sequence[frozenset[str]]] = ((),)
    ):
        first, *others = (ForwardPlaces(problem) for problem in problems)
        self.places = [first.names_at(place) for place in first.spaced(others)]
        read = [
            segment_costs(problem, self.places, sets)
            for problem, sets in zip(problems, more, strict=True)
        ]
        self.forms = [(number, saved) for number, one in enumerate(read) for saved in one.saved]
        self.costs = Costs(
            [form for one in read for form in one.forms],
            read[0].forward_us,
            np.max([one.between_bytes for one in read], axis=0),
            read[0].new_bytes,
            read[0].pinned_bytes,
        )
        self._most_bytes = _ROUNDED * self.costs.most_bytes

    def least_room(self) -> list[list[frozenset[str]]]:
        """The places of some placements without nested stops, those of the least room first."""
        table = CheckpointTable(self.costs, self._most_bytes, _COARSE)
        near = 1.1 * table.placements(levels=0)[-1].room_bytes
        found = self.table(near).placements(levels=0)[-_TRIED:]
        return [[self.places[stop - 1] for stop in sorted(one.levels)] for one in reversed(found)]

    def table(self, most_bytes: float) -> CheckpointTable:
        """The placements of all rooms up to the given one."""
        return CheckpointTable(self.costs, most_bytes, _FINE)

    def levels(self, placement: Placement) -> dict[str, int]:
        """The values that are stored in a placement, each with its lowest level."""
        found: dict[str, int] = {}
        for segment, form in enumerate(placement.forms):
            found.update(dict.fromkeys(self.forms[form][1][segment], 0))
        for stop, level in placement.levels.items():
            for name in self.places[stop - 1]:
                found[name] = min(level, found.get(name, level))
        return found


def checkpoints(problem: CutProblem) -> Candidate:
    """The checkpoints of one level with the lowest simulated peak.

    Of equal peaks, those that recompute least.
    """
    has_loops = any(is_loop(value.name) for value in problem.values)
    problems = (problem, _with_loops_pinned(problem)) if has_loops else (problem,)
    tried = [
        (_saved_at(one, places), one, places)
        for one in problems
        for places in Chain([one]).least_room()
    ]
    lowest, one, places = min(tried, key=lambda found: _peak_and_time(found[0]))
    # The last ops of the backward run in another order where the first block is recomputed whole.
    counts = range(1, min(_FIRST, len(places)) + 1)
    return min((lowest, *(_saved_at(one, places[n:]) for n in counts)), key=_peak_and_time)


def _peak_and_time(candidate: Candidate) -> tuple[int, float]:
    return candidate.peak_bytes, candidate.us


def _saved_at(problem: CutProblem, places: Sequence[frozenset[str]]) -> Candidate:
    """The plan that saves what is alive at these places, and what must not be recomputed."""
    alive = frozenset[str]().union(*places)
    return Candidate(problem, Plan(read_by_backward(problem, complete(problem, alive))))


def slow_results(problem: CutProblem, saved: frozenset[str]) -> frozenset[str]:
    """The results of heavy ops that are slow for their bytes: their time per byte is above the
    average of all that backward repeats, attention's above all. The modes are chosen."""
    ops = recomputed_heavy_ops(problem, saved)
    average_us_per_byte = sum(op.us for op in ops) / max(1, sum(op.bytes for op in ops))
    return frozenset().union(*(op.results for op in ops if op.us_per_byte > average_us_per_byte))


def _with_loops_pinned(problem: CutProblem) -> CutProblem:
    values = (
        dataclasses.replace(value, pinned=True) if is_loop(value.name) and not value.tag else value
        for value in problem.values
    )
    return dataclasses.replace(problem, values=tuple(values))


_MOST_PLACES = 80  # the table of checkpoint_table.py grows with their third power
_APART, _FURTHER = 1 / 8192, 1.3  # weight between two places, at least; its steps
_BESIDE, _AS_NARROW = 2, 1.25  # places on either side; a place may be so much wider than these
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

    def names_at(self, place: int) -> frozenset[str]:
        """The values to save at a place: those alive there."""
        return frozenset(self.values[i].name for i in self._alive_at[place])

    def spaced(self, others: Iterable[ForwardPlaces] = ()) -> list[int]:
        """Some of the places, in order: between two of them lie time or bytes worth a place.

        Of places that are close to each other the one with the fewest bytes alive is taken.

        Args:
            others: the forward with other modes, which have the same values alive at these places.
        """
        weights, apart = self._weights(), _APART
        known = [set(map(other.names_at, other.places)) for other in others]
        places = [p for p in self.places if all(self.names_at(p) in names for names in known)]
        if len(places) > _MOST_PLACES:
            places = self._narrower_than_beside(places)
        found = self._clusters(places, weights, apart)
        while len(found) > _MOST_PLACES:
            apart *= _FURTHER
            found = self._clusters(places, weights, apart)
        return [min(close, key=self._alive_bytes) for close in found]

    def _narrower_than_beside(self, places: list[int]) -> list[int]:
        """Without the places that have one beside them at which far fewer bytes are alive."""
        sizes = [self._alive_bytes(place) for place in places]
        return [
            place
            for i, (place, size) in enumerate(zip(places, sizes, strict=True))
            if size <= _AS_NARROW * min(sizes[max(0, i - _BESIDE) : i + _BESIDE + 1])
        ]

    def _clusters(self, places: list[int], weights: list[float], apart: float) -> list[list[int]]:
        found: list[list[int]] = []
        for place in places:
            if found and weights[place] - weights[found[-1][0]] < apart:
                found[-1].append(place)
            else:
                found.append([place])
        return found

    def _alive_bytes(self, place: int) -> int:
        return sum(self.values[i].bytes for i in self._alive_at[place])

    def _weights(self) -> list[float]:
        """What lies before each position: its share of the time, and of the bytes that backward
        needs, half each."""
        needed = self._needed()
        sizes = [v.bytes if i in needed and not v.free else 0 for i, v in enumerate(self.values)]
        times = [value.us if value.forward else 0.0 for value in self.values]
        all_bytes, all_us = sum(sizes) or 1, sum(times) or 1
        shares = (b / all_bytes + us / all_us for b, us in zip(sizes, times, strict=True))
        return list(itertools.accumulate(share / 2 for share in shares))

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
        """The values alive at each position; None where one of them cannot be saved.

        Those that no gradient depends on, such as a counter's next value, are not among them.
        """
        found: list[frozenset[int] | None] = []
        alive: set[int] = set()
        of_use = self._before_backward()
        for i, value in enumerate(self.values):
            alive = {j for j in alive if last_use[j] > i}
            if not value.free and value.forward and last_use[i] > i and i in of_use:
                alive.add(i)
            savable = all(self.values[j].savable for j in alive)
            found.append(frozenset(alive) if savable else None)
        return found

    def _before_backward(self) -> set[int]:
        """The values that backward reads, and all that these are computed from."""
        found: set[int] = set()
        for i in reversed(range(len(self.values))):
            value = self.values[i]
            if value.needed or not value.forward or i in found:
                found.update((i, self._base[i]), (self._index[name] for name in value.inputs))
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
