"""What the segments of a forward need and take, read off two simulations.

The step is simulated once *apart*, with everything saved that is alive at the places: backward then
does one segment after the other, from the last one, and what is in memory besides saved values
belongs to the segment at hand and to the gradients so far. A second simulation, of the *whole* step
without places, tells what is kept of other segments' recomputation meanwhile, and what takes time
only where the end of a segment is not stored.

A recomputed value belongs to the segment in which the forward computes it; an op that needs a
tangent to the segment that was last begun. A segment begins with the first of its values that is
recomputed from what is alive at its beginning: others, such as tables of positions, are read by
many segments and recomputed for the last of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np

from mstpass.memory.simulate_ops import Moment, Timeline
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.checkpoint_table import Array, Form
from mstpass.partition.solvers.min_cut import complete
from mstpass.problem.op import CONSTANT, INPUT, VIEW
from mstpass.problem.problem import CutProblem, Value, pinned_bytes
from mstpass.problem.saved_set import read_by_backward


@dataclasses.dataclass(frozen=True)
class SegmentCosts:
    """A chain in the modes of one problem; the arrays are those of ``Costs``.

    Attributes:
        forms: with nothing saved but what is alive at places, and then with more.
        saved: what more the forward saves in each form, by segment.
    """

    forms: Sequence[Form]
    saved: Sequence[Sequence[frozenset[str]]]
    forward_us: Array
    between_bytes: Array
    new_bytes: Array
    pinned_bytes: Array


def segment_costs(
    problem: CutProblem, places: Sequence[frozenset[str]], more: Sequence[frozenset[str]] = ()
) -> SegmentCosts:
    """The costs of a problem whose modes are chosen.

    Args:
        places: the values alive at each place, in the order of the forward.
        more: sets of values, each of which the forward may save besides.
    """
    reader = _Reader(problem, places)
    every = (names - reader.stored - reader.whole.saved for names in more)
    sets = [names for names in every if reader.bytes_of(names)]
    saved = [[reader.in_segment(names, s) for s in range(reader.count)] for names in (set(), *sets)]
    forms = (reader.form(), *(reader.form_with(names) for names in sets))
    return SegmentCosts(
        forms,
        saved,
        reader.us(value for value in problem.values if value.forward),
        reader.between_bytes(),
        reader.new_bytes(sum),
        reader.new_bytes(pinned_bytes),
    )


class _Reader:
    """The simulations, and the segment of each value.

    Attributes:
        stops: the values that are stored at each stop; what every plan saves is not among them.
        count: of the segments.
    """

    def __init__(self, problem: CutProblem, places: Sequence[frozenset[str]]):
        self.problem, self.count = problem, len(places) + 1
        self.index = {value.name: i for i, value in enumerate(problem.values)}
        begins = np.zeros(len(problem.values) + 1, np.int64)  # of segments, by position
        for names in places:
            begins[max(self.index[name] for name in names) + 1] += 1
        self.segment = dict(zip(self.index, begins.cumsum().tolist(), strict=False))
        self.whole = self._step(frozenset())
        self.stops = [frozenset[str](), *(names - self.whole.saved for names in places)]
        self.stored = frozenset[str]().union(*self.stops)
        self.apart = self._step(self.stored)
        self.in_backward = self._backward_segments()

    def _step(self, names: frozenset[str]) -> StepSimulation:
        saved = read_by_backward(self.problem, complete(self.problem, names))
        return StepSimulation(self.problem, saved)

    def form(self) -> Form:
        """The form in which nothing is saved but what is alive at places."""
        again_us = self.us(self.apart.program.backward)
        return Form(
            self.highest(self.apart.backward, self.in_backward, self.stored),
            self.forward_bytes(self.apart, self.stored),
            self._kept_bytes(),
            self._step_us(self.apart),
            np.maximum(0.0, self.us(self.whole.program.backward) - again_us),
            np.zeros(self.count),
        )

    def form_with(self, names: frozenset[str]) -> Form:
        """The form in which the forward saves these values as well."""
        step = self._step(self.stored | names)
        segments: dict[str, int] = {}
        now = 0
        for op in reversed(step.program.backward):  # recomputed for the next op with a tangent
            if op.name not in self.segment:
                now = self.in_backward[op.name]
            segments[op.name] = now
        none = np.zeros(self.count)
        kept_bytes = np.zeros((self.count, self.count))
        saved = [self.in_segment(names, segment) for segment in range(self.count)]
        return Form(
            self.highest(step.backward, segments, self.stored | names),
            self.forward_bytes(step, self.stored | names),
            kept_bytes,
            self._step_us(step),
            none,
            np.array([float(self.bytes_of(own)) for own in saved]),
        )

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.problem.values[self.index[name]].bytes for name in names)

    def in_segment(self, names: Set[str], segment: int) -> frozenset[str]:
        """Those of the values that a segment of the forward computes."""
        return frozenset(name for name in names if self.segment[name] == segment)

    def _step_us(self, step: StepSimulation) -> Array:
        own = [op for op in step.program.backward if op.name not in self.segment]
        us = self.us(step.program.forward) + self.us(step.program.backward)
        return us + self.us(own, self.in_backward)

    # ---- which op belongs to which segment, and takes how long -----------------------------------
    def _backward_segments(self) -> dict[str, int]:
        """The segment of each op of the backward in which all is saved at places."""
        begin = self._beginnings()
        ops = self.apart.program.backward
        recomputed = {begin[op.name] for op in ops if op.name in begin and op.kind != INPUT}
        order = [self.count - 1, *sorted(recomputed - {self.count - 1}, reverse=True)]
        following = dict(itertools.pairwise(order))
        found, now = {}, self.count - 1
        for op in ops:
            if op.kind != INPUT and op.name in begin and following.get(now) == begin[op.name]:
                now = following[now]
            found[op.name] = now
        return found

    def _beginnings(self) -> dict[str, int]:
        """The values that are computed from what is alive at the beginning of their segment, and
        those of the first segment; each with its segment."""
        found: dict[str, int] = {}
        for value in self.problem.values:
            segment = self.segment[value.name]
            new = self.stops[segment] - self.stops[segment - 1] if segment else self.stops[0]
            from_new = any(n in new or found.get(n) == segment for n in value.inputs)
            if from_new or not segment:
                found[value.name] = segment
        views = {value.name for value in self.problem.values if value.kind in (VIEW, CONSTANT)}
        return {name: segment for name, segment in found.items() if name not in views}

    def us(self, ops: Iterable[Value], segments: Mapping[str, int] | None = None) -> Array:
        """The time of the ops by segment; of those whose segment is known."""
        segments = self.segment if segments is None else segments
        us = np.zeros(self.count)
        for op in ops:
            if op.name in segments:
                us[segments[op.name]] += op.us
        return us

    # ---- bytes -----------------------------------------------------------------------------------
    def highest(self, timeline: Timeline, segments: Mapping[str, int], stored: Set[str]) -> Array:
        """The highest bytes of each segment, besides these values."""
        changes = np.zeros(len(timeline.moments) + 1)
        for name in stored & timeline.lives.keys():
            start, end = timeline.lives[name]
            changes[start] += timeline.ops[name].bytes
            changes[end] -= timeline.ops[name].bytes
        found = np.zeros(self.count)
        for moment, there in zip(timeline.moments, changes.cumsum(), strict=False):
            segment = segments[moment.node]
            found[segment] = max(found[segment], moment.bytes - there)
        return found

    def forward_bytes(self, step: StepSimulation, stored: Set[str]) -> Array:
        """The highest bytes of each segment in the forward, besides what is stored."""
        segments = {op.name: self.segment[op.name] for op in step.program.forward}
        return self.highest(step.forward, segments, stored)

    def between_bytes(self) -> Array:
        """What is in memory behind the last moment of each segment of the backward."""
        timeline, found = self.apart.backward, np.zeros(self.count)
        last = [-1] * self.count
        for i, moment in enumerate(timeline.moments):
            last[self.in_backward[moment.node]] = i
        for buffer in timeline.buffers():
            if buffer.node not in self.stored:
                for segment, at in enumerate(itertools.accumulate(reversed(last), max)):
                    if buffer.start <= at < buffer.end - 1:
                        found[self.count - 1 - segment] += buffer.bytes
        return found

    def _kept_bytes(self) -> Array:
        """What is kept of the segments from a on while segment s has its peak, for ``[a, s]``."""
        peaks: dict[int, Moment] = {}
        for moment in self.apart.backward.moments:
            if moment.node not in self.segment:  # it runs in the whole step as well
                segment = self.in_backward[moment.node]
                peaks[segment] = max(moment, peaks.get(segment, moment), key=lambda m: m.bytes)
        whole = self.whole.backward
        position = {moment.node: i for i, moment in enumerate(whole.moments)}
        at = np.full(self.count, -1)
        for segment, moment in peaks.items():
            at[segment] = position.get(moment.node, -1)
        found = np.zeros((self.count, self.count))
        for buffer in whole.buffers():
            if buffer.node in self.segment and buffer.node not in self.whole.saved:
                own = self.segment[buffer.node]
                found[own, own + 1 :] += buffer.bytes * (
                    (buffer.start <= at[own + 1 :]) & (at[own + 1 :] < buffer.end)
                )
        return found[::-1].cumsum(0)[::-1]

    def new_bytes(self, total: Callable[[Iterable[int]], int]) -> Array:
        """For each stop m, what is alive there and not at stop a: ``[a, m]``.

        Args:
            total: what values of given bytes take.
        """
        found = np.zeros((self.count + 1, self.count + 1))
        for a, m in itertools.combinations(range(self.count), 2):
            names = self.stops[m] - self.stops[a]
            found[a, m] = total(self.problem.values[self.index[name]].bytes for name in names)
        return found
