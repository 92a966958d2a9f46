"""Which ops run as kernels, which kernels run as one, and which of their results have a buffer.

The rules are those of memory/simulate_ops.py: 1, 2, 5 and 7 are here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set

from mstpass.memory.kernel_rules import (
    NOTHING,
    KernelValue,
    combined,
    fused_groups,
    in_order,
    in_place,
    readers_through_views,
    waits,
)
from mstpass.problem.op import (
    CALL,
    CONSTANT,
    INPUT,
    ITEM,
    POINTWISE,
    REALIZED,
    REDUCTION,
    SCATTER,
    SIZE,
    VIEW,
    Op,
)
from mstpass.walk import walk, walk_once

_KERNELS = frozenset({CALL, REALIZED, REDUCTION, SCATTER})
_MANY_READS = 4  # config.realize_reads_threshold, for values that are read more than once
# By whether it is on the CPU, which in older versions has the limits of a GPU.
_MOST_READS = {True: 12, False: 8}  # config.realize_cpu_acc_reads_threshold, for all values
_MANY_OPS = {True: 50, False: 30}  # config.realize_cpu_opcount_threshold
_EXPANDED = 4  # a reader larger by this factor expands a value; a cast makes one of at most 4


class Kernels:
    """Which ops are kernels, and what each of them reads and writes.

    Attributes:
        kept: names of the buffers that leave the graph.
        read_by: of each kernel the buffers that it reads, in the order of the kernels.
        results: of each kernel the buffers that it writes.
        readers: of each buffer the kernels that read it.
        waiting: the scatters that wait for their rows.
        parts: the values that are computed in their place in a concatenation.
    """

    def __init__(self, ops: Sequence[Op], kept: Iterable[str], freed: Set[str]):
        self.freed = freed
        self.op = {op.name: op for op in ops}
        self.users: dict[str, list[str]] = {}
        for op in ops:
            for name in op.inputs:
                self.users.setdefault(name, []).append(op.name)
        scatters = [op for op in ops if op.may_wait and op.kind == SCATTER]
        self.waiting = {op.name for op in scatters if waits(op, self.op, self.users, freed)}
        for name in self.waiting:  # it reads the rows from memory, as a call does
            self.op[name] = dataclasses.replace(self.op[name], kind=CALL)
        kept = {name for name in kept if name in self.op}
        self._parts_of: dict[str, frozenset[str]] = {}  # none is known yet
        placed, self._parts_of = in_place(self.op, self.users, self._bases_of(kept))
        self.op |= placed
        self.parts = {name for name, op in placed.items() if op.kind != VIEW}
        self.kept = self._bases_of(kept)
        self.read_by: dict[str, frozenset[str]] = {}
        self.results: dict[str, list[str]] = {}
        self._value: dict[str, KernelValue] = {}
        # Of each kernel the buffers that it reads in loops of its own, with and without those of
        # which it reads the elements that it would read there.
        self.read_apart: dict[str, frozenset[str]] = {}
        self._read_unfused: dict[str, frozenset[str]] = {}
        # Of each sum over outer dims, all that it reads.
        self._loads: dict[str, frozenset[str]] = {}
        self._loops_end: dict[str, frozenset[int]] = {}
        for op in self.op.values():
            self._add(op)
        self.readers: dict[str, list[str]] = {}
        for kernel, read in self.read_by.items():
            for buffer in read:
                self.readers.setdefault(buffer, []).append(kernel)
        self._writer = {name: kernel for kernel, names in self.results.items() for name in names}
        self._known_behind: dict[str, Set[str]] = {}
        # Of each kernel: how many calls are before it in the graph's order.
        is_call = [self.op[kernel].kind == CALL for kernel in self.read_by]
        self._calls_before = dict(
            zip(self.read_by, itertools.accumulate(is_call, initial=0), strict=False)
        )

    def _add(self, op: Op) -> None:
        name, kind, values = op.name, op.kind, self._value
        if kind in (INPUT, SIZE):
            reads = self.freed & {name} if kind == INPUT else NOTHING
            loads = frozenset(((name, NOTHING),)) if kind == INPUT else NOTHING
            values[name] = KernelValue(frozenset(reads), loads, NOTHING)
            return
        operands = [values[operand] for operand in op.inputs if operand in values]
        value = values[name] = combined(op, operands)
        if kind == VIEW:
            value.from_call = op.inputs[0] in values and values[op.inputs[0]].from_call
            if value.from_call:  # what reads it is behind the call, however many views there are
                value.stage = max(operand.stage for operand in operands)
            return
        if kind == ITEM:
            value.from_call = op.inputs[0] in self.op and self.op[op.inputs[0]].kind == CALL
            if operands and op.inputs[0] in self.results:
                value.stage = operands[0].stage
                value.becomes_buffer(op)
                return
        if self._is_kernel(op, value):
            self.read_by[name] = value.reads
            items = [user for user in self.users.get(name, ()) if self.op[user].kind == ITEM]
            self.results[name] = items or [name]
            elsewhere = frozenset([buffer for buffer, places in value.loads if places])
            self.read_apart[name] = value.apart & elsewhere
            if kind == SCATTER:  # its first operand is copied, into the buffer that it writes
                rest = (o for o in op.inputs if o in values and o != op.inputs[0])
                self.read_apart[name] = NOTHING.union(*[values[o].reads for o in rest])
            self._read_unfused[name] = value.apart
            if self._sums_outer_dims(name):
                self._loads[name] = frozenset([buffer for buffer, _ in value.loads])
            if op.on_cpu:
                self._loops_end[name] = value.loops_end.intersection(op.outer_sizes)
            value.becomes_buffer(op)
            value.reads |= self._parts_of.get(name, NOTHING)

    def _is_kernel(self, op: Op, value: KernelValue) -> bool:
        if op.kind in _KERNELS or op.name in self.parts:
            return True
        readers = readers_through_views(op.name, self.op, self.users)
        if op.name in self.kept or any(self.op[name].kind == CALL for name in readers):
            return op.kind != CONSTANT or op.name in self.kept
        num_loads = len(value.loads)
        if len(readers) < 2:
            expanded = any(self.op[name].bytes > _EXPANDED * op.bytes for name in readers)
            return num_loads > _MOST_READS[op.on_cpu] or (expanded and value.slow)
        return num_loads > _MANY_READS or value.num_ops > _MANY_OPS[op.on_cpu] or value.slow

    def _bases_of(self, names: Iterable[str]) -> set[str]:
        reached = (name for name in walk(names, self._shown) if not self._shown(name))
        return {base for name in reached for base in (name, *self._parts_of.get(name, ()))}

    def _shown(self, name: str) -> Sequence[str]:
        """The operand of a view; several of a concatenation."""
        op = self.op[name]
        if op.kind != VIEW or op.inputs[0] not in self.op:
            return ()
        return op.inputs if op.concatenates else op.inputs[:1]

    def is_never_overwritten(self, buffer: str) -> bool:
        """Whether a scatter wrote the buffer, or it is a concatenation's."""
        return buffer in self.parts or (buffer in self.op and self.op[buffer].kind == SCATTER)

    @functools.cached_property
    def fused_away(self) -> Set[str]:
        """The buffers that only kernels of their own stage read (rule 5)."""
        return {
            buffer
            for buffer in self.readers.keys() & self.read_by.keys()
            if self.op[buffer].kind not in (CALL, SCATTER)
            if not (self._is_reduction(buffer) and self.op[buffer].on_cpu)
            if buffer not in self.kept and buffer not in self.parts
            if all(
                self.op[kernel].kind != CALL
                and self._are_one_stage(buffer, kernel)
                and buffer not in self._read_unfused[kernel]
                and not self._loops_differ(buffer, kernel)
                and not self._is_between_nests(buffer, kernel)
                for kernel in self.readers[buffer]
            )
        }

    def _are_one_stage(self, buffer: str, kernel: str) -> bool:
        """Whether the kernel that writes the buffer may run as one with the other that reads it."""
        return (
            self._value[kernel].stage == self._value[buffer].stage
            or self._calls_before[kernel] == self._calls_before[buffer]
        )

    def _loops_differ(self, buffer: str, kernel: str) -> bool:
        """Whether a kernel cannot run in the loop that writes a buffer it reads.

        Loops over dims that end elsewhere are not made one. On a CPU a reduction ends the loop over
        its rows (``_can_fuse_nodes_with_compatible_ranges``, ``CppScheduling.can_fuse_vertical``).
        """
        written, read = (self._loops_end.get(name, NOTHING) for name in (buffer, kernel))
        if self._is_reduction(kernel):
            rows = {self._numel(kernel)}
            written, read = written - rows, read - rows
        return written != read and (self._is_reduction(kernel) or bool(written and read))

    def _is_between_nests(self, buffer: str, kernel: str) -> bool:
        """Whether a kernel behind a reduction of a value reads the value from memory.

        On a CPU a reduction of rows ends a nest of loops. It shares its loop over the rows with the
        nests behind it, and one row of the value is kept for these, unless one of them runs over
        the rows alone, as the kernel of their logarithms does (``local_buffers`` in
        ``CppScheduling.codegen_outer_loop_node``).
        """
        if not self._is_pointwise_on_cpu(buffer) or len(self.readers[buffer]) < 2:
            return False
        behind = self._behind(kernel)
        ends = (k for k in behind if self._is_reduction(k) and buffer in self._behind(k))
        rows = {self._numel(k) for k in ends}
        over_rows = (
            k for k in self.read_by if self._is_pointwise_on_cpu(k) and self._numel(k) in rows
        )
        return bool(rows) and any(
            k in behind or (buffer in self._behind(k) and not self.is_reduced(k)) for k in over_rows
        )

    def _is_pointwise_on_cpu(self, kernel: str) -> bool:
        return self.op[kernel].on_cpu and self.op[kernel].kind in (POINTWISE, REALIZED)

    def _is_reduction(self, kernel: str) -> bool:
        return self.op[kernel].kind == REDUCTION

    def is_reduced(self, kernel: str) -> bool:
        """Whether a reduction reads the kernel's result."""
        return any(map(self._is_reduction, self.readers.get(kernel, ())))

    def _numel(self, kernel: str) -> int:
        return self.op[self.results[kernel][0]].numel

    def functions(self, fuse: bool) -> list[list[tuple[str, ...]]]:
        """The kernels that run as one, in order, and which of them are one function (rule 7)."""
        functions: list[list[tuple[str, ...]]] = []
        open_function = False
        for group in self._fused(fuse):
            joins = self.op[group[0]].on_cpu and self.op[group[0]].kind != CALL
            if joins and open_function:
                functions[-1].append(group)
            else:
                functions.append([group])
            open_function = joins
        return functions

    def _fused(self, fuse: bool) -> list[tuple[str, ...]]:
        if not fuse:
            return in_order(self.read_by, self._writer, self._fused_across_calls())
        calls = {kernel for kernel in self.read_by if self.op[kernel].kind in (CALL, SCATTER)}
        # Sums over outer dims are fused for an input, as a norm's, that both read.
        reads = {k: read | self._loads.get(k, frozenset()) for k, read in self.read_by.items()}
        return fused_groups(reads, self._writer, self._loop_nest, calls)

    def _loop_nest(self, kernel: str) -> tuple[int, bool]:
        """The same for kernels that may share it: a sum over outer dims has its own."""
        return self.op[kernel].numel, self._sums_outer_dims(kernel)

    def _sums_outer_dims(self, kernel: str) -> bool:
        return self.op[kernel].kind == REDUCTION and self.op[kernel].own_loops

    def _fused_across_calls(self) -> Set[str]:
        """The buffers without memory that a kernel reads behind a call, in the graph's order."""
        before = self._calls_before
        return {
            buffer
            for buffer in self.fused_away
            if any(before[kernel] != before[buffer] for kernel in self.readers[buffer])
        }

    def run_as_one(self, kernel: str, other: str, group: tuple[str, ...], buffer: str) -> bool:
        """Whether Inductor may fuse two kernels because both read the buffer."""
        if not self.op[kernel].on_cpu:
            return other in group
        stage = self._value[kernel].stage
        if self._value[other].stage != stage or self.op[other].kind == CALL:
            return False
        before, others = self._behind(kernel), self._behind(other)
        if other in before:
            return False
        apart, is_reduction = buffer in self.read_apart[other], self.op[other].kind == REDUCTION
        if apart == is_reduction:
            return not apart
        # A loop over rows has reductions of the rows in it, and what reads one element of each, if
        # they follow the same kernel as the others.
        return not before.isdisjoint(others)

    def _behind(self, kernel: str) -> Set[str]:
        """The kernels of the same stage whose results a kernel reads, directly or not."""
        if kernel in self._known_behind:
            return self._known_behind[kernel]
        stage = self._value[kernel].stage

        def writers(of: str) -> Iterator[str]:
            found = (self._writer.get(buffer, "") for buffer in self.read_by[of])
            return (k for k in found if k and self._value[k].stage >= stage)

        self._known_behind[kernel] = found = set(walk_once(writers(kernel), writers))
        return found
