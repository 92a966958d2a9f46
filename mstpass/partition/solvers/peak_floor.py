"""What the peak of a saved set is at least, found a hundred times faster than by a simulation.

It is the highest of the bounds of memory_lower_bounds.py under the saved set. Searches leave out
what it shows to be no lower than the best plan so far.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mstpass.memory.repeated_values import CHEAP_KINDS
from mstpass.partition.solvers.memory_lower_bounds import BackwardBounds, ForwardBounds
from mstpass.problem.op import CALL, CONSTANT, INPUT, ITEM, VIEW
from mstpass.problem.problem import CutProblem, Value


class _Span(NamedTuple):
    """Bytes that are in memory from one position to another."""

    bytes: int
    first: int
    last: int


class PeakFloor:
    """Lower bounds of the peaks of a problem whose modes are chosen.

    They hold as well where backward computes cheap values twice (memory/repeated_values.py): of
    what backward computes only the results of calls count, and what leaves the graph.
    """

    def __init__(self, problem: CutProblem):
        self._graphs = (_forward(problem), _backward(problem))

    @functools.cached_property
    def least_bytes(self) -> int:
        """No plan of the problem has a lower peak."""
        return self.bytes_of(frozenset())

    def bytes_of(self, saved: Set[str]) -> int:
        """No plan that saves these values on the device, and others or none, has a lower peak."""
        return max(graph.bytes_of(saved) for graph in self._graphs)


class _Graph:
    """One of the two graphs.

    Args:
        spans: what is in memory under every plan.
        of_saved: what is in memory besides where a value is saved, by its name.
    """

    def __init__(
        self,
        bounds: BackwardBounds | ForwardBounds,
        spans: Iterable[_Span],
        of_saved: dict[str, list[_Span]],
    ):
        self._of_saved, self._kernels = of_saved, sorted(bounds.kernels)
        self._fixed = np.array([op.inner_bytes for op in bounds.ops], np.int64)
        self._fixed += self._alive(spans)

    def bytes_of(self, saved: Set[str]) -> int:
        spans = (span for name in saved for span in self._of_saved.get(name, ()))
        at_kernels = (self._fixed + self._alive(spans))[self._kernels]
        return int(at_kernels.max(initial=0))

    def _alive(self, spans: Iterable[_Span]) -> NDArray[np.int64]:
        """The bytes in memory at each position."""
        length = len(self._fixed)
        changes = np.zeros(length + 1, np.int64)
        for span in spans:
            if span.first < length:
                changes[max(0, span.first)] += span.bytes
                changes[min(length, span.last + 1)] -= span.bytes
        return np.cumsum(changes)[:-1]


def _backward(problem: CutProblem) -> _Graph:
    bounds = BackwardBounds(problem)
    by_name = {op.name: op for op in bounds.ops}
    lasting = (
        _Span(buffer.bytes, buffer.first, buffer.last)
        for buffer in bounds.buffers
        if by_name[buffer.name].kind not in CHEAP_KINDS or buffer.last == len(bounds.ops)
    )
    reads, shown_by = bounds.reads, _outputs(problem)
    again = {
        v.name: _Span(v.bytes, reads.first[v.name], reads.last[v.name])
        for v in bounds.certain
        if v.kind in (CALL, ITEM) and v.name in reads.last and v.name not in shown_by
    }
    shown = {base.name: base for base in shown_by.values()}
    held = (_Span(base.bytes, 0, len(bounds.ops)) for base in shown.values())
    of_saved: dict[str, list[_Span]] = {}
    for value in problem.values:
        if value.savable and not value.free and value.kind != INPUT:
            crossing = _Span(value.bytes, 0, bounds.held_until(value.name))
            of_saved[value.name] = [] if value.name in shown_by else [crossing]
            if span := again.get(value.name):  # it is there instead of being computed again
                of_saved[value.name].append(span._replace(bytes=-span.bytes))
    return _Graph(bounds, [*lasting, *again.values(), *held], of_saved)


def _outputs(problem: CutProblem) -> dict[str, Value]:
    """What the caller holds while backward runs: the values that outputs show, by their names and
    those of the views in between."""
    by_name = {value.name: value for value in problem.values}
    found: dict[str, Value] = {}
    for name in problem.outputs:
        chain = [name]
        while by_name[chain[-1]].kind == VIEW and by_name[chain[-1]].inputs:
            chain.append(by_name[chain[-1]].inputs[0])
        base = by_name[chain[-1]]
        if base.kind not in (INPUT, CONSTANT) and not base.free:
            found.update(dict.fromkeys(chain, base))
    return found


def _forward(problem: CutProblem) -> _Graph:
    bounds = ForwardBounds(problem)
    position = bounds.positions()
    # A value counts for an op that runs after it, or writes it.
    ends = [position[op.name] + (op.kind == CALL) for op in bounds.ops]
    buffers = {buffer.name: buffer for buffer in bounds.buffers}
    of_saved: dict[str, list[_Span]] = {}
    for value in problem.values:
        if value.savable and not value.free and value.kind not in (INPUT, VIEW):
            first = bisect.bisect_right(ends, position[value.name])
            if buffer := buffers.get(value.name):  # it stays when nothing in forward reads it
                first = max(first, buffer.last + 1)
            of_saved[value.name] = [_Span(value.bytes, first, len(ends))]
    spans = (_Span(buffer.bytes, buffer.first, buffer.last) for buffer in bounds.buffers)
    return _Graph(bounds, spans, of_saved)
