"""Simulate the memory of a compiled graph from its ops: the model of Inductor's buffers.

Nodes are not buffers. Which nodes Inductor gives a buffer, and how long that lives, is modelled by
seven rules (sources: torch/_inductor/lowering.py and ir.py for 1 to 3, codegen/cpp.py for 7,
scheduler.py for the others):

1. *Kernels* are calls (matmuls, attention, loops, and all ops that the op table does not know),
   reductions, scatters, values that are realized, and those pointwise values that a call reads,
   that leave the graph, or that are read more than once and are slow to compute (``Op.slow``, their
   own or of an op that they are computed from without a buffer in between; or many reads or ops).
   Reads of the same place of a buffer are one, through whichever slices.
   Being expanded counts as being read more than once. Every other pointwise value is computed
   inside the kernels that read it and has no buffer; so are reductions of a few elements, which
   are unrolled.
2. A view shares the buffer of its base, and so does a part of what was split. Each item of a call's
   result has a buffer of its own; those that nobody reads are freed with the call. Those parts of a
   concatenation that are computed in their places in it share its buffer (kernel_rules.py).
3. A call may need a workspace while it runs. That of a loop is the peak of one chunk.
4. Buffers that no later kernel reads, and that do not leave the graph, are freed.
5. A buffer that only kernels of its own *stage* read is fused away, unless one of them reads it
   through an op that needs loops of its own (``Op.own_loops``), or, on the CPU, needs loops that
   end at other dims (``Op.loops_end``), or comes behind a reduction of the value beside a kernel
   over the rows alone. On the CPU, a reduction's result always has a buffer. A stage is a stretch
   without a call in between, in the order of the graph or on the paths in it. Kernels that such a
   buffer joins run where the first of them does, once what all of them read is there
   (kernel_rules.py). The buffer of a scatter stays, as its rows are written in any order.
6. A pointwise kernel or reduction may write its result into the buffer of an operand that has the
   same size and that it is the last to read, if no other kernel that reads it runs as one with it;
   it may be what a value without a buffer between them, that is not reduced, would have been
   written over.
   A scatter writes into a copy of its first operand, and the copy is such a pointwise kernel; what
   the scatter reads besides, it reads after that. Nothing is written over what a scatter or a
   concatenation's parts wrote, and these parts are written over nothing.
7. On the CPU, kernels without a call in between are one function: what they write is allocated
   before it, and what they read is freed after it.

Pseudo-code::

    alive = the freed inputs
    for kernels in the functions that run one after the other:
        write over an operand where rule 6 allows it
        alive += their results;  this moment = alive + workspace
        alive -= what nobody reads any more

Ops are plain data (problem/op.py), so that a plan is simulated without a graph.

A ``Timeline`` is what the simulation finds: the buffers that are alive while each kernel runs. A
*moment* is the run of one kernel, or of several that Inductor fuses into one. ``StepMemory`` joins
forward and backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from mstpass.memory.kernels import Kernels
from mstpass.problem.op import CALL, INPUT, VIEW, Op

# Ends the name of a buffer that the caller holds, if backward computes a value of the same name.
HELD = " (output)"


class Moment(NamedTuple):
    """One kernel: the bytes that are alive while it runs, its results and workspace included."""

    node: str
    bytes: int


class Buffer(NamedTuple):
    """A buffer that is alive from moment ``start`` up to, but not including, moment ``end``."""

    node: str
    bytes: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The memory of one graph over its kernels.

    Attributes:
        moments: one for each kernel, in the order in which they run.
        alive: name and bytes of each buffer that is alive at the peak, the largest first.
        lives: of each buffer the number of its first moment, and of the first one without it.
            Kernels that run as one, or in one function, have the same buffers in all their moments.
        ops: all ops by name.
    """

    moments: tuple[Moment, ...]
    alive: tuple[Moment, ...]
    lives: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict, repr=False)
    ops: Mapping[str, Op] = dataclasses.field(default_factory=dict, repr=False)

    def buffers(self) -> list[Buffer]:
        """All buffers. A moment's bytes are those alive then, and the kernel's ``inner_bytes``."""
        return [Buffer(n, self.ops[n].bytes, *life) for n, life in self.lives.items()]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=operator.attrgetter("bytes"), default=Moment("", 0))


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory of a step, above what was allocated when its forward began.

    Attributes:
        known: False if a size depends on data; such a size counts as 1.
    """

    forward: Timeline
    backward: Timeline
    known: bool = True

    @property
    def peak_bytes(self) -> int:
        """The higher of both peaks. Gradients are part of the backward."""
        return max(self.forward.peak.bytes, self.backward.peak.bytes)

    @property
    def peak(self) -> Timeline:
        """The timeline with the higher peak."""
        return max(self.forward, self.backward, key=lambda timeline: timeline.peak.bytes)


def simulate_ops(
    ops: Sequence[Op], kept: Iterable[str], freed: Iterable[str] = (), fuse: bool = False
) -> Timeline:
    """The memory of one graph over its ops, in their order.

    Args:
        kept: names of the values that leave the graph.
        freed: names of the inputs that are freed after their last use, such as the saved values of
            a backward. Other inputs, such as parameters, do not count.
        fuse: kernels that read the same buffer run as one (kernel_rules.py). They do in a loop's
            body; in a step schedule/delay_recomputation.py keeps most of them apart.
    """
    kernels = Kernels(ops, kept, set(freed))
    return _Run(kernels, fuse).timeline()


@dataclasses.dataclass(frozen=True)
class GraphOps:
    """The ops of one graph, with what leaves it and what it frees: see ``simulate_ops``."""

    ops: tuple[Op, ...]
    kept: tuple[str, ...]
    freed: tuple[str, ...] = ()

    def simulated(self) -> Timeline:
        """The memory of the graph."""
        return simulate_ops(self.ops, self.kept, self.freed)


def backward_of(
    forward: Sequence[Op],
    outputs: Iterable[str],
    crossing: Set[str],
    backward: Sequence[Op],
    gradients: Iterable[str],
    freed: Iterable[str],
) -> GraphOps:
    """A backward beside the forward's outputs, which the caller holds while it runs.

    Outputs that do not cross to it are new inputs, alive all the time. Those that do are not freed
    after their last use.

    Args:
        outputs: names of what the forward returns to the caller.
        crossing: names of the forward values that are inputs of the backward.
        gradients: names of what the backward returns.
        freed: names of the inputs that it frees.
    """
    op = {o.name: o for o in forward}
    taken = {o.name for o in backward}  # names of values that backward computes again
    held: dict[str, Op] = {}
    kept: list[str] = []
    for name in outputs:
        while name not in crossing and name in op and _is_view_in(op, name):
            name = op[name].inputs[0]
        if name in crossing:
            kept.append(name)
        elif name in op and op[name].kind != INPUT:
            unique = f"{name}{HELD}" if name in taken else name
            held[name] = Op(unique, op[name].bytes, kind=INPUT)
    freed = (*freed, *(op.name for op in held.values()))
    return GraphOps((*held.values(), *backward), (*gradients, *kept), freed)


def _is_view_in(op: Mapping[str, Op], name: str) -> bool:
    return op[name].kind == VIEW and op[name].inputs[0] in op


class _Run:
    """One run over the kernels: which buffers each of them allocates and frees."""

    def __init__(self, kernels: Kernels, fuse: bool):
        self.kernels, self.op = kernels, kernels.op
        self.fused_away = kernels.fused_away
        self.functions = kernels.functions(fuse)
        self.last_use: dict[str, int] = {}
        self.last_reader: dict[str, tuple[str, ...]] = {}
        for i, function in enumerate(self.functions):
            for group in function:
                for kernel in group:
                    self.last_use.update(dict.fromkeys(kernels.read_by[kernel], i))
                    self.last_reader.update(dict.fromkeys(kernels.read_by[kernel], group))
        # The number of kernels before each function, and before the end of the graph.
        sizes = (sum(map(len, function)) for function in self.functions)
        self.begins = list(itertools.accumulate(sizes, initial=0))
        self.alive = {op.name: op.bytes for op in kernels.op.values() if op.name in kernels.freed}
        self.now = sum(self.alive.values())  # bytes
        self.place_of: dict[str, str] = {}  # of what has no buffer, what it would be written over
        # First moment, and the first without the buffer; until it is freed, the end of the graph.
        self.lives = dict.fromkeys(self.alive, (0, self.begins[-1]))

    def timeline(self) -> Timeline:
        dies_at: dict[int, list[str]] = {}
        for buffer, i in self.last_use.items():
            if buffer not in self.kernels.kept:
                dies_at.setdefault(i, []).append(buffer)
        moments: list[Moment] = []
        for i, function in enumerate(self.functions):
            dying = dies_at.get(i, [])
            born = [name for group in function for name in self._allocate(i, group, dying)]
            inner_bytes = max(self.op[kernel].inner_bytes for g in function for kernel in g)
            moments += [Moment(kernel, self.now + inner_bytes) for g in function for kernel in g]
            unused = [b for b in born if b not in self.last_use and b not in self.kernels.kept]
            for buffer in (*dying, *unused):
                if buffer in self.alive:
                    self._free(buffer, i + 1)
        sizes = [moment.bytes for moment in moments]
        peak = sizes.index(max(sizes)) if any(sizes) else len(moments)
        there = (
            Moment(b, self.op[b].bytes) for b, life in self.lives.items() if peak in range(*life)
        )
        alive_at_peak = tuple(sorted(there, key=lambda moment: -moment.bytes))
        return Timeline(tuple(moments), alive_at_peak, self.lives, self.op)

    def _allocate(self, i: int, group: tuple[str, ...], dying: list[str]) -> dict[str, int]:
        """Allocate the results of the group; what they are written over is freed."""
        born: dict[str, int] = {}
        for kernel in group:
            if kernel in self.fused_away:
                operand = self._written_over(kernel, group, dying, [self.op[kernel].bytes])
                if operand is not None and not self.kernels.is_reduced(kernel):
                    self.place_of[kernel] = operand
                continue
            results = self._results_read_outside(kernel, group)
            new = {name: size for name in results if (size := self.op[name].bytes)}
            operand = self._written_over(kernel, group, dying, list(new.values()))
            if operand is not None:
                self._free(operand, i)
            born |= new
        self.alive |= born
        self.lives |= dict.fromkeys(born, (self.begins[i], self.begins[-1]))
        self.now += sum(born.values())
        return born

    def _free(self, buffer: str, end: int) -> None:
        self.now -= self.alive.pop(buffer)
        self.lives[buffer] = self.lives[buffer][0], self.begins[end]

    def _results_read_outside(self, kernel: str, group: tuple[str, ...]) -> list[str]:
        """The results that need a buffer: not only kernels of the group read them."""
        results = self.kernels.results[kernel]
        if len(group) == 1:
            return results
        inside = set(group)
        return [
            name
            for name in results
            if name in self.kernels.kept
            or not inside.issuperset(self.kernels.readers.get(name, ()))
        ]

    def _written_over(
        self, kernel: str, group: tuple[str, ...], dying: list[str], new_bytes: list[int]
    ) -> str | None:
        """The operand that the kernel's result may be written over (rule 6)."""
        if self.op[kernel].kind == CALL or kernel in self.kernels.parts:
            return None
        read = self.kernels.read_by[kernel] - self.kernels.read_apart[kernel]
        places = {self.place_of.get(buffer, buffer): buffer for buffer in read}
        for place in dying:
            if place in places and [self.alive.get(place)] == new_bytes:
                buffer = places[place]
                if self.kernels.is_never_overwritten(place):
                    continue
                if self.last_reader[buffer] == group and not any(
                    self.kernels.run_as_one(kernel, other, group, buffer)
                    for other in self.kernels.readers[buffer]
                    if other != kernel
                ):
                    return place
        return None
