"""Lower bounds on the memory of single kernels, linear in what is saved and recomputed.

For a problem whose modes are chosen, the bytes alive while an op k runs are at least::

    fixed_k + sum over v of saved_k[v] S[v] + sum over v of recomputed_k[v] B[v]

under every saved set, where S[v] is 1 if v crosses and B[v] is 1 if backward computes v. A bound
counts only buffers that are certain, by the rules of memory/simulate_ops.py:

- in backward, a saved value that k or a later op reads, or that nothing before k can read;
- in backward, a recomputed value that is certain to have a buffer, if an op up to k and an op from
  k on read it;
- in forward, a saved value from the op that computes it on;
- a buffer of the graph's own ops that is certain, from its op to its last reader, or to the end if
  it leaves the graph.

It is certain that a value has a buffer if it is the result of a call or a scatter, an item of a
call or an operand of one, or if it leaves the graph. What k itself writes counts only if k cannot
write over what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from mstpass.problem.op import (
    CALL,
    CONSTANT,
    INPUT,
    ITEM,
    POINTWISE,
    REALIZED,
    REDUCTION,
    SCATTER,
    VIEW,
)
from mstpass.problem.problem import CutProblem, Value
from mstpass.walk import walk_once

_KERNELS = frozenset({CALL, REDUCTION, SCATTER})
_WRITTEN = frozenset({POINTWISE, REALIZED})  # run as kernels where they leave the graph
_BUFFERS = frozenset({CALL, ITEM, SCATTER})
_BEFORE_ALL = -1  # a position before the first op


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """Bytes alive at least while one op runs.

    Attributes:
        node: the op that runs.
        in_forward: whether it runs in the forward graph or in the backward graph.
        fixed: bytes that are there under every saved set.
        saved: bytes of each value that are there if it crosses.
        recomputed: bytes of each value that are there if backward computes it.
    """

    node: str
    in_forward: bool
    fixed: int
    saved: dict[str, int]
    recomputed: dict[str, int]

    def bytes_of(self, saved: Set[str], recomputed: Set[str]) -> int:
        """The bound under a plan that saves and recomputes these values."""
        return (
            self.fixed
            + sum(size for name, size in self.saved.items() if name in saved)
            + sum(size for name, size in self.recomputed.items() if name in recomputed)
        )


def lower_bounds(problem: CutProblem) -> Iterator[LowerBound]:
    """One bound for each op that is certain to run as a kernel, the backward's first.

    The modes of the problem are chosen.
    """
    yield from _in_backward(problem)
    yield from _in_forward(problem)


def certain_bytes(problem: CutProblem) -> dict[str, int]:
    """The bytes of each value that is certain to have a buffer when no loop computes it."""
    ops = (*problem.values, *problem.backward)
    buffers = _certain_buffers(ops, _Reads(ops), frozenset(), _names_with_items(ops))
    return {buffer.name: buffer.bytes for buffer in buffers}


class _Reads:
    """The first and the last position at which an op reads a value, itself or a view of it."""

    def __init__(self, ops: Sequence[Value], views: Iterable[Value] = ()):
        """
        Args:
            ops: in the order in which they run.
            views: further views, of values that are not among the ops.
        """
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.by_call: set[str] = set()
        for i, op in enumerate(ops):
            for name in op.inputs:
                self._add(name, i, i, op.kind == CALL)
        own_views = (op for op in ops if op.kind == VIEW)
        for view in reversed([*views, *own_views]):
            if view.name in self.last:
                for name in view.inputs:
                    by_call = view.name in self.by_call
                    self._add(name, self.first[view.name], self.last[view.name], by_call)

    def _add(self, name: str, first: int, last: int, by_call: bool) -> None:
        self.first[name] = min(first, self.first.get(name, first))
        self.last[name] = max(last, self.last.get(name, last))
        if by_call:
            self.by_call.add(name)


class _Buffer(NamedTuple):
    """A buffer that is certain to be in memory from one position to another."""

    name: str
    bytes: int
    first: int
    last: int


def _certain_buffers(
    ops: Sequence[Value], reads: _Reads, leaving: Set[str], with_items: Set[str]
) -> list[_Buffer]:
    """The certain buffers of the results of ops.

    Args:
        leaving: names of the values that leave the graph.
        with_items: names of the calls whose results are items, which have the buffers.
    """
    position = {op.name: i for i, op in enumerate(ops)}
    by_name = {op.name: op for op in ops}
    found = []
    for i, op in enumerate(ops):
        if op.kind in (VIEW, INPUT) or op.name in with_items:
            continue
        certain = op.kind in _BUFFERS or (op.name in reads.by_call and op.kind != CONSTANT)
        if not certain and op.name not in leaving:
            continue
        first = position.get(op.inputs[0], i) if op.kind == ITEM else i
        first += op.kind not in (CALL, ITEM) and _may_write_over(by_name, op)
        last = len(ops) if op.name in leaving else reads.last.get(op.name, _BEFORE_ALL)
        found.append(_Buffer(op.name, op.bytes, first, last))
    return found


def _may_write_over(ops: Mapping[str, Value], op: Value) -> bool:
    """Whether a kernel may write its result into a buffer that it reads (rule 6).

    It reads the buffers of its operands, and what those are computed from that have none.
    """
    further = lambda name: () if ops[name].kind in _BUFFERS else ops[name].inputs
    fits = lambda name: name not in ops or ops[name].bytes == op.bytes or op.kind == SCATTER
    return any(map(fits, walk_once(op.inputs, further)))


def _names_with_items(ops: Iterable[Value]) -> set[str]:
    return {op.inputs[0] for op in ops if op.kind == ITEM and op.inputs}


class _Graph:
    """What every plan runs of the forward, or of the backward.

    Attributes:
        ops: in order.
        buffers: the certain buffers of their results, and of tangents.
    """

    def __init__(
        self,
        problem: CutProblem,
        ops: Sequence[Value],
        results: Iterable[str],
        views: Iterable[Value] = (),
    ):
        """
        Args:
            results: what the graph returns.
            views: as of ``_Reads``.
        """
        by_name = {v.name: v for v in (*problem.values, *problem.backward)}
        shown = lambda name: by_name[name].inputs[:1] if by_name[name].kind == VIEW else ()
        self._leaving = {n for n in walk_once(results, shown) if not shown(n)}
        runs = set(walk_once(results, lambda name: by_name[name].inputs))
        self.ops = [op for op in ops if op.name in runs]
        self.reads = _Reads(self.ops, views)
        with_items = _names_with_items(by_name.values())
        self.buffers = _certain_buffers(self.ops, self.reads, self._leaving, with_items)
        for op in self.ops:
            if op.kind == INPUT and not op.free:  # a tangent is there from the beginning
                last = self.reads.last.get(op.name, _BEFORE_ALL)
                last = len(self.ops) if op.name in self._leaving else last
                self.buffers.append(_Buffer(op.name, op.bytes, _BEFORE_ALL, last))

    def kernels(self) -> Iterator[tuple[int, Value, list[_Buffer]]]:
        """The ops that are certain to run as a kernel: the position of each, and the certain
        buffers in memory while it runs."""
        for i, op in enumerate(self.ops):
            if op.kind in _KERNELS or (op.kind in _WRITTEN and op.name in self._leaving):
                yield i, op, [b for b in self.buffers if b.first <= i <= b.last]


def _savable(problem: CutProblem) -> list[Value]:
    return [v for v in problem.values if v.savable and not v.free and v.kind not in (INPUT, VIEW)]


def _in_backward(problem: CutProblem) -> Iterator[LowerBound]:
    views = [v for v in problem.values if v.kind == VIEW and not v.savable and not v.free]
    graph = _Graph(problem, problem.backward, problem.gradients, views)
    reads, end = graph.reads, len(graph.ops)
    earliest = _earliest_reads(problem, graph.ops)
    with_items = _names_with_items(problem.values)
    certain = [  # the forward values that are certain to have a buffer where backward computes them
        v
        for v in problem.values
        if v.kind not in (VIEW, CONSTANT, INPUT) and v.name not in with_items and not v.free
        if v.kind in (CALL, ITEM) or v.name in reads.by_call
    ]
    held_until = [  # under every plan that saves the value
        (v, max(reads.last.get(v.name, _BEFORE_ALL), earliest.get(v.name, end) - 1))
        for v in _savable(problem)
    ]
    for i, op, alive in graph.kernels():
        between = (v for v in certain if v.name in reads.last)
        between = (v for v in between if reads.first[v.name] <= i <= reads.last[v.name])
        yield LowerBound(
            op.name,
            in_forward=False,
            fixed=sum(buffer.bytes for buffer in alive) + op.inner_bytes,
            saved={v.name: v.bytes for v, last in held_until if i <= last},
            recomputed={v.name: v.bytes for v in between},
        )


def _earliest_reads(problem: CutProblem, ops: Sequence[Value]) -> dict[str, int]:
    """The first position at which any plan reads a value, to use it or to recompute another."""
    earliest: dict[str, int] = {}
    for i, op in reversed(list(enumerate(ops))):
        earliest.update(dict.fromkeys(op.inputs, i))
    for value in reversed(problem.values):
        at = earliest.get(value.name, len(ops))
        for name in value.inputs:
            earliest[name] = min(at, earliest.get(name, at))
    return earliest


def _in_forward(problem: CutProblem) -> Iterator[LowerBound]:
    position = {v.name: i for i, v in enumerate(problem.values)}
    for value in problem.values:
        if value.kind == ITEM and value.inputs:  # the call writes it
            position[value.name] = position[value.inputs[0]]
    savable = _savable(problem)
    graph = _Graph(problem, problem.values, filter(position.__contains__, problem.outputs))
    for _, op, alive in graph.kernels():
        counted = {buffer.name for buffer in alive}
        end = position[op.name] + (op.kind == CALL)
        before = (v for v in savable if position[v.name] < end and v.name not in counted)
        yield LowerBound(
            op.name,
            in_forward=True,
            fixed=sum(buffer.bytes for buffer in alive) + op.inner_bytes,
            saved={v.name: v.bytes for v in before},
            recomputed={},
        )
