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
    yield from BackwardBounds(problem).bounds()
    yield from ForwardBounds(problem).bounds()


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


@dataclasses.dataclass(frozen=True)
class CertainBuffer:
    """A buffer that is certain to be in memory from one position to another."""

    name: str
    bytes: int
    first: int
    last: int


def _certain_buffers(
    ops: Sequence[Value], reads: _Reads, leaving: Set[str], with_items: Set[str]
) -> list[CertainBuffer]:
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
        found.append(CertainBuffer(op.name, op.bytes, first, last))
    return found


def _may_write_over(ops: Mapping[str, Value], op: Value) -> bool:
    """Whether a kernel may write its result into a buffer that it reads (rule 6).

    It reads the buffers of its operands, and what those are computed from that have none.
    """
    further = lambda name: () if ops[name].kind in _BUFFERS else ops[name].inputs
    fits = lambda name: name not in ops or ops[name].bytes == op.bytes or op.kind == SCATTER
    return any(map(fits, walk_once(op.inputs, further)))


def _certain_kernels(ops: Sequence[Value], leaving: Set[str]) -> set[int]:
    """The positions of the ops that are certain to run as a kernel."""
    certain = (i for i, op in enumerate(ops) if op.kind in _KERNELS)
    written = (i for i, op in enumerate(ops) if op.kind in _WRITTEN and op.name in leaving)
    return {*certain, *written}


def _alive(buffers: list[CertainBuffer], i: int) -> list[CertainBuffer]:
    """The buffers in memory while the i-th op runs."""
    return [b for b in buffers if b.first <= i <= b.last]


def _total(buffers: list[CertainBuffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


def _names_with_items(ops: Iterable[Value]) -> set[str]:
    return {op.inputs[0] for op in ops if op.kind == ITEM and op.inputs}


def _base(by_name: Mapping[str, Value], name: str) -> str:
    """The value that a view shows; any other value itself."""
    while by_name[name].kind == VIEW and by_name[name].inputs:
        name = by_name[name].inputs[0]
    return name


class BackwardBounds:
    """The bounds of the ops of the backward graph.

    Attributes:
        ops: what every plan's backward runs, in order.
        kernels: the positions of those that are certain to run as a kernel.
        buffers: the certain buffers of their results.
        certain: the forward values that are certain to have a buffer when backward computes them.
    """

    def __init__(self, problem: CutProblem):
        self.problem = problem
        by_name = {v.name: v for v in (*problem.values, *problem.backward)}
        used = set(problem.gradients)
        for op in reversed(problem.backward):
            if op.name in used:
                used.update(op.inputs)
        self.ops = [op for op in problem.backward if op.name in used]
        views = [v for v in problem.values if v.kind == VIEW and not v.savable and not v.free]
        self.reads = _Reads(self.ops, views)
        leaving = {_base(by_name, name) for name in problem.gradients}
        self.kernels = _certain_kernels(self.ops, leaving)
        self.buffers = _certain_buffers(self.ops, self.reads, leaving, _names_with_items(self.ops))
        for op in self.ops:
            if op.kind == INPUT:  # a tangent is there from the beginning
                last = self.reads.last.get(op.name, _BEFORE_ALL)
                last = len(self.ops) if op.name in leaving else last
                self.buffers.append(CertainBuffer(op.name, op.bytes, _BEFORE_ALL, last))
        self.earliest_read = self._earliest_reads()
        with_items = _names_with_items(problem.values)
        self.certain = [
            v
            for v in problem.values
            if v.kind not in (VIEW, CONSTANT, INPUT) and v.name not in with_items and not v.free
            if v.kind in (CALL, ITEM) or v.name in self.reads.by_call
        ]

    def _earliest_reads(self) -> dict[str, int]:
        """The first position at which any plan reads a value, to use it or to recompute another."""
        earliest: dict[str, int] = {}
        for i, op in reversed(list(enumerate(self.ops))):
            for name in op.inputs:
                earliest[name] = i
        for value in reversed(self.problem.values):
            at = earliest.get(value.name, len(self.ops))
            for name in value.inputs:
                earliest[name] = min(at, earliest.get(name, at))
        return earliest

    def bounds(self) -> Iterator[LowerBound]:
        savable = [v for v in self.problem.values if v.savable and not v.free and v.kind != INPUT]
        for i, op in enumerate(self.ops):
            if i in self.kernels:
                yield LowerBound(
                    op.name,
                    in_forward=False,
                    fixed=_total(_alive(self.buffers, i)) + op.inner_bytes,
                    saved={v.name: v.bytes for v in savable if i <= self.held_until(v.name)},
                    recomputed={
                        v.name: v.bytes for v in self.certain if self._is_between_reads(v.name, i)
                    },
                )

    def held_until(self, name: str) -> int:
        """The last position at which a saved value is in memory under every plan."""
        last = self.reads.last.get(name, _BEFORE_ALL)
        return max(last, self.earliest_read.get(name, len(self.ops)) - 1)

    def _is_between_reads(self, name: str, i: int) -> bool:
        return self.reads.first.get(name, i + 1) <= i <= self.reads.last.get(name, _BEFORE_ALL)


class ForwardBounds:
    """The bounds of the ops of the forward graph that every plan runs.

    Attributes:
        ops: these ops, in order.
        kernels: the positions of those that are certain to run as a kernel.
        buffers: the certain buffers of their results.
    """

    def __init__(self, problem: CutProblem):
        self.problem = problem
        by_name = {v.name: v for v in problem.values}
        outputs = {name for name in problem.outputs if name in by_name}
        runs = set(outputs)
        for value in reversed(problem.values):
            if value.name in runs:
                runs.update(value.inputs)
        self.ops = [v for v in problem.values if v.name in runs]
        leaving = {_base(by_name, name) for name in outputs}
        self.kernels = _certain_kernels(self.ops, leaving)
        self.buffers = _certain_buffers(
            self.ops, _Reads(self.ops), leaving, _names_with_items(problem.values)
        )

    def positions(self) -> dict[str, int]:
        """Where each forward value is computed, by its place in the problem."""
        position = {v.name: i for i, v in enumerate(self.problem.values)}
        for value in self.problem.values:
            if value.kind == ITEM and value.inputs:  # the call writes it
                position[value.name] = position[value.inputs[0]]
        return position

    def bounds(self) -> Iterator[LowerBound]:
        position = self.positions()
        savable = [
            v
            for v in self.problem.values
            if v.savable and not v.free and v.kind not in (INPUT, VIEW)
        ]
        for i, op in enumerate(self.ops):
            if i not in self.kernels:
                continue
            alive = _alive(self.buffers, i)
            counted = {buffer.name for buffer in alive}
            end = position[op.name] + (op.kind == CALL)
            saved = {
                v.name: v.bytes for v in savable if position[v.name] < end and v.name not in counted
            }
            yield LowerBound(
                op.name,
                in_forward=True,
                fixed=_total(alive) + op.inner_bytes,
                saved=saved,
                recomputed={},
            )
