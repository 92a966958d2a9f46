"""Bounds from below on the memory of a step's moments, linear in what is saved and recomputed.

For regions in given modes, the bytes alive while an op k runs are at least ``fixed + the sum of
saved[v] where v crosses + the sum of again[v] where v is recomputed``, whatever crosses. Counted is
only what must be there under every saved set, by the rules of memory/simulate_ops.py:

- a saved value that k or a later op of the backward reads, or that nothing before k can need;
- a recomputed value that has a buffer for sure, and is read both by k or before it and by k or
  later;
- buffers of the backward's own ops and of the forward's that have one for sure, from the op to its
  last reader, or to the end where they leave the graph;
- in forward, what is saved, from where it is computed.

A buffer is for sure: an item of a call, a call's own result, what a call reads, what leaves the
graph. What k itself writes counts where k cannot write over an operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set

from mstpass.problem.op import CALL, CONSTANT, INPUT, ITEM, REDUCTION, SCATTER, VIEW
from mstpass.problem.problem import CutProblem, Value

_RUNS = frozenset({CALL, REDUCTION, SCATTER})
_NEVER = -1


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bytes that are alive at least while ``node`` runs in one of the two graphs, by value."""

    node: str
    in_forward: bool
    fixed: int
    saved: dict[str, int]
    again: dict[str, int]

    def bytes_of(self, saved: Set[str], again: Set[str]) -> int:
        """Under a plan that saves and recomputes these."""
        crossing = sum(size for name, size in self.saved.items() if name in saved)
        return self.fixed + crossing + sum(s for name, s in self.again.items() if name in again)


def bounds(problem: CutProblem) -> Iterator[Bound]:
    """Of a problem without open regions: one for each op of backward and forward that surely runs
    as a kernel."""
    yield from _Backward(problem).bounds()
    yield from _Forward(problem).bounds()


class _Uses:
    """Where the values of a sequence of ops are read, views' reads included, by position."""

    def __init__(self, ops: Sequence[Value], views: Iterable[Value] = ()):
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.by_call: set[str] = set()
        for i, op in enumerate(ops):
            for name in op.inputs:
                self._read(name, i, i, op.kind == CALL)
        own = (op for op in ops if op.kind == VIEW)
        for view in reversed([*views, *own]):
            if view.name in self.last:
                for name in view.inputs:
                    call = view.name in self.by_call
                    self._read(name, self.first[view.name], self.last[view.name], call)

    def _read(self, name: str, first: int, last: int, by_call: bool) -> None:
        self.first[name] = min(first, self.first.get(name, first))
        self.last[name] = max(last, self.last.get(name, last))
        if by_call:
            self.by_call.add(name)


def _base(by_name: dict[str, Value], name: str) -> str:
    while by_name[name].kind == VIEW and by_name[name].inputs:
        name = by_name[name].inputs[0]
    return name


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """For sure in memory from one position to another."""

    name: str
    bytes: int
    first: int
    last: int


def _with_items(ops: Iterable[Value]) -> set[str]:
    return {op.inputs[0] for op in ops if op.kind == ITEM and op.inputs}


def _sure_buffers(
    ops: Sequence[Value], uses: _Uses, kept: Set[str], with_items: Set[str]
) -> list[_Buffer]:
    position = {op.name: i for i, op in enumerate(ops)}
    found = []
    for i, op in enumerate(ops):
        if op.kind in (VIEW, INPUT) or op.name in with_items:
            continue
        own = op.kind in (CALL, ITEM) or (op.name in uses.by_call and op.kind != CONSTANT)
        if not own and op.name not in kept:
            continue
        first = position.get(op.inputs[0], i) if op.kind == ITEM else i
        last = len(ops) if op.name in kept else uses.last.get(op.name, _NEVER)
        found.append(_Buffer(op.name, op.bytes, first, last))
    return found


def _fixed_at(buffers: list[_Buffer], ops: Sequence[Value], i: int) -> list[_Buffer]:
    """What is alive at a position, but for what its op may write over an operand."""
    return [
        buffer
        for buffer in buffers
        if buffer.first <= i <= buffer.last and (buffer.first < i or ops[i].kind in (CALL, SCATTER))
    ]


def _bytes(buffers: list[_Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


class _Backward:
    def __init__(self, problem: CutProblem):
        self.problem = problem
        by_name = {v.name: v for v in (*problem.values, *problem.backward)}
        used = set(problem.gradients)
        for op in reversed(problem.backward):
            if op.name in used:
                used.update(op.inputs)
        self.ops = [op for op in problem.backward if op.name in used]
        views = [v for v in problem.values if v.kind == VIEW and not v.savable and not v.free]
        self.uses = _Uses(self.ops, views)
        kept = {_base(by_name, name) for name in problem.gradients}
        self.buffers = _sure_buffers(self.ops, self.uses, kept, _with_items(self.ops))
        for op in self.ops:
            if op.kind == INPUT:
                last = len(self.ops) if op.name in kept else self.uses.last.get(op.name, _NEVER)
                self.buffers.append(_Buffer(op.name, op.bytes, _NEVER, last))
        self.earliest = self._earliest()
        items = _with_items(problem.values)
        self.calls = [
            v
            for v in problem.values
            if v.kind not in (VIEW, CONSTANT, INPUT) and v.name not in items and not v.free
            if v.kind in (CALL, ITEM) or v.name in self.uses.by_call
        ]

    def _earliest(self) -> dict[str, int]:
        """The first position at which anything may be read of a value, itself or recomputed."""
        earliest: dict[str, int] = {}
        for i, op in reversed(list(enumerate(self.ops))):
            for name in op.inputs:
                earliest[name] = i
        for value in reversed(self.problem.values):
            at = earliest.get(value.name, len(self.ops))
            for name in value.inputs:
                earliest[name] = min(at, earliest.get(name, at))
        return earliest

    def bounds(self) -> Iterator[Bound]:
        crossing = [v for v in self.problem.values if v.savable and not v.free and v.kind != INPUT]
        for i, op in enumerate(self.ops):
            if op.kind not in _RUNS:
                continue
            fixed = _fixed_at(self.buffers, self.ops, i)
            saved = {v.name: v.bytes for v in crossing if self._waits(v.name, i)}
            again = {v.name: v.bytes for v in self.calls if self._held(v.name, i)}
            yield Bound(op.name, False, _bytes(fixed) + op.inner_bytes, saved, again)

    def _waits(self, name: str, i: int) -> bool:
        return self.uses.last.get(name, _NEVER) >= i or self.earliest.get(name, len(self.ops)) > i

    def _held(self, name: str, i: int) -> bool:
        return self.uses.first.get(name, i + 1) <= i <= self.uses.last.get(name, _NEVER)


class _Forward:
    def __init__(self, problem: CutProblem):
        self.problem = problem
        by_name = {v.name: v for v in problem.values}
        runs = {name for name in problem.outputs if name in by_name}
        for value in reversed(problem.values):
            if value.name in runs:
                runs.update(value.inputs)
        self.ops = [v for v in problem.values if v.name in runs]
        self.kept = {_base(by_name, name) for name in problem.outputs if name in by_name}
        self.buffers = _sure_buffers(
            self.ops, _Uses(self.ops), self.kept, _with_items(problem.values)
        )

    def bounds(self) -> Iterator[Bound]:
        position = {v.name: i for i, v in enumerate(self.problem.values)}
        for value in self.problem.values:
            if value.kind == ITEM and value.inputs:  # written by the call
                position[value.name] = position[value.inputs[0]]
        crossing = [
            v
            for v in self.problem.values
            if v.savable and not v.free and v.kind not in (INPUT, VIEW)
        ]
        for i, op in enumerate(self.ops):
            if op.kind not in _RUNS:
                continue
            fixed = _fixed_at(self.buffers, self.ops, i)
            counted = {buffer.name for buffer in fixed}
            end = position[op.name] + (op.kind == CALL)
            saved = {
                v.name: v.bytes
                for v in crossing
                if position[v.name] < end and v.name not in counted
            }
            yield Bound(op.name, True, _bytes(fixed) + op.inner_bytes, saved, {})
