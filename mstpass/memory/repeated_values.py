"""Which cheap values backward computes once more for their later readers.

Backward computes each recomputed value once, just before its first use, and keeps it to the last.
The least-memory plan recomputes the operands of attention from the norm before it. That norm is
read first by attention's projections and again, when attention's backward is over, by the gradients
of their weights; the peak of the step lies in between. The search::

    repeat, while the backward has the peak:
        for each value alive at the peak, the largest first:
            if it has readers before and after the peak, and is cheap to compute:
                copy it, and what it is computed from, to just before the first later reader,
                    down to values that are alive there in any case
                take these copies if the step's peak does not rise and the bytes at this place fall

schedule/delay_recomputation.py keeps the copies from being computed earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from mstpass.memory.kernel_rules import readers_through_views
from mstpass.memory.simulate_ops import GraphOps, Moment, StepMemory
from mstpass.problem.op import CONSTANT, INPUT, POINTWISE, REDUCTION, VIEW, Op
from mstpass.walk import walk_once

CHEAP_KINDS = (POINTWISE, REDUCTION, VIEW, CONSTANT)
MOST_LOWERED = 1.25  # a peak is hardly more than this factor above what the copies leave
_MOST = 16  # values of one graph


@dataclasses.dataclass(frozen=True)
class Repeated:
    """The ops of the backward with the copies in place, and the memory of the step with them."""

    backward: GraphOps
    memory: StepMemory


def repeated_values(memory: StepMemory, backward: GraphOps, cheap: Set[str]) -> Repeated:
    """The copies that lower the memory of a step.

    Args:
        memory: the simulated memory of the step.
        backward: the ops of its backward.
        cheap: names of those that may be computed twice.
    """
    found = Repeated(backward, memory)
    names = set(cheap)
    for number in range(_MOST):
        memory = found.memory
        more = _one_more(found, names, number) if memory.peak is memory.backward else None
        if more is None:
            break
        found = more
        names.update(op.name for op in found.backward.ops if op.name.endswith(_again(number)))
    return found


def _again(number: int) -> str:
    """What the names of the copies that are made at once end with."""
    return f":again:{number}"


def _one_more(before: Repeated, cheap: Set[str], number: int) -> Repeated | None:
    """With the copies of the first value that lower the memory. None if there is no such value."""
    memory, graph = before.memory, _Graph(before.backward)
    peak = memory.backward.peak
    for alive in memory.backward.alive:
        other = graph.with_copies(alive.node, peak.node, cheap, number)
        if other is None:
            continue
        after = dataclasses.replace(memory, backward=other.simulated())
        if after.peak_bytes <= memory.peak_bytes and _bytes_at(peak, after) < peak.bytes:
            return Repeated(other, after)
    return None


def _bytes_at(place: Moment, memory: StepMemory) -> int:
    return next(m.bytes for m in memory.backward.moments if m.node == place.node)


class _Graph:
    """The ops of a graph, with their order and readers."""

    def __init__(self, graph: GraphOps):
        self.graph = graph
        self.op = {op.name: op for op in graph.ops}
        self.order = {op.name: i for i, op in enumerate(graph.ops)}
        self.users: dict[str, list[str]] = {}
        for op in graph.ops:
            for name in dict.fromkeys(op.inputs):
                self.users.setdefault(name, []).append(op.name)
        self.kept = {self._viewed(name) for name in graph.kept if name in self.op}

    def with_copies(self, name: str, place: str, cheap: Set[str], number: int) -> GraphOps | None:
        """The ops with copies of a value, and of what it is computed from, in front of its first
        reader behind a place; None if it has no readers on both sides, or is not cheap."""
        if name not in cheap or name in self.kept:
            return None
        readers = readers_through_views(name, self.op, self.users)
        later = sorted({r for r in readers if self.order[r] > self.order[place]}, key=self._at)
        if not later or len(later) == len(set(readers)):
            return None
        new = {one: f"{one}{_again(number)}" for one in self._chain(name, later, cheap)}
        if not new:
            return None
        ops: list[Op] = []
        for op in self.graph.ops:
            if op.name == later[0]:
                ops += [self.op[one].reading(new, copy) for one, copy in new.items()]
            ops.append(op.reading(new, op.name) if op.name in later else op)
        return dataclasses.replace(self.graph, ops=tuple(ops))

    def _at(self, name: str) -> int:
        return self.order[name]

    def _viewed(self, name: str) -> str:
        while self.op[name].kind == VIEW and self.op[name].inputs[0] in self.op:
            name = self.op[name].inputs[0]
        return name

    def _chain(self, value: str, later: Sequence[str], cheap: Set[str]) -> list[str]:
        """What to copy, in order: the value, its views that are read later, and its operands.

        Operands end at values that others keep alive until the first later reader. Empty if an op
        on the way is not cheap.
        """
        of_value = lambda name: self._viewed(name) == value
        is_copied = lambda name: of_value(name) or not self._is_alive_until(name, later[0])
        copied = lambda name: filter(is_copied, self._inputs(name)) if name in cheap else ()
        read = (i for reader in later for i in filter(of_value, self._inputs(reader)))
        found = [*walk_once(read, copied)]
        return sorted(found, key=self._at) if cheap >= set(found) else []

    def _inputs(self, name: str) -> list[str]:
        """The operands that are ops of the graph; others, such as parameters, exist all along."""
        return [i for i in self.op[name].inputs if i in self.op]

    def _is_alive_until(self, name: str, place: str) -> bool:
        """Whether the value is an input of the graph, or is read at the place or after it."""
        base = self._viewed(name)
        if self.op[base].kind == INPUT or base in self.kept:
            return True
        readers = readers_through_views(base, self.op, self.users)
        return any(self.order[r] >= self.order[place] for r in readers)
