"""Which ops run as kernels, which kernels run as one, and which of their results have a buffer.

The rules are those of memory/simulate_ops.py: 1, 2, 5 and 7 are here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from mstpass.memory.concatenations import in_place
from mstpass.memory.delayed_scatters import waits
from mstpass.memory.kernel_fusion import fused_groups
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

_KERNELS = frozenset({CALL, REALIZED, REDUCTION, SCATTER})
_MANY_READS = 4  # config.realize_reads_threshold, for values that are read more than once
# By whether it is on the CPU, which in older versions has the limits of a GPU.
_MOST_READS = {True: 12, False: 8}  # config.realize_cpu_acc_reads_threshold, for all values
_MANY_OPS = {True: 50, False: 30}  # config.realize_cpu_opcount_threshold
_EXPANDED = 4  # a reader larger by this factor expands a value; a cast makes one of at most 4
_ONE_ELEMENT = 8  # bytes, at most
_NOTHING = frozenset[str]()


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
        placed = in_place(self.op, self.users, self._bases_of(kept))
        self.op |= placed
        self.parts = {name for name, op in placed.items() if op.kind != VIEW}
        self.kept = self._bases_of(kept)
        self.read_by: dict[str, frozenset[str]] = {}
        self.results: dict[str, list[str]] = {}
        self._from_call: set[str] = set()  # values in buffers that a call writes
        # Of each value, kernel or not: the buffers that it is computed from, the same with inputs
        # that are not freed and with each place where they are read, how many ops that takes, and
        # its stage: the most calls on a path to it.
        self._reads: dict[str, frozenset[str]] = {}
        self._loads: dict[str, frozenset[Any]] = {}
        self._num_ops: dict[str, int] = {}
        self._stage: dict[str, int] = {}
        # Of each value: the buffers of ``_reads`` that it reads in loops of its own, and these with
        # those that it reads through a view that merges dims. The same of each kernel. And which
        # values no kernel holds that are dear to compute.
        self._apart_reads: dict[str, frozenset[str]] = {}
        self._unfused_reads: dict[str, frozenset[str]] = {}
        self.read_apart: dict[str, frozenset[str]] = {}
        self._read_unfused: dict[str, frozenset[str]] = {}
        self._dear: set[str] = set()
        # Values whose loops Inductor keeps apart, dim by dim; of others it makes one loop.
        self._loops_by_dim: set[str] = set()
        for op in self.op.values():
            self._add(op)
        self.readers: dict[str, list[str]] = {}
        for kernel, read in self.read_by.items():
            for buffer in read:
                self.readers.setdefault(buffer, []).append(kernel)
        self._writer = {name: kernel for kernel, names in self.results.items() for name in names}
        # Of each kernel: how many calls are before it in the graph's order.
        is_call = [self.op[kernel].kind == CALL for kernel in self.read_by]
        self._calls_before = dict(
            zip(self.read_by, itertools.accumulate(is_call, initial=0), strict=False)
        )

    def _add(self, op: Op) -> None:
        name = op.name
        if op.kind in (INPUT, SIZE):
            self._reads[name] = frozenset({name} & self.freed) if op.kind == INPUT else _NOTHING
            self._loads[name] = frozenset({name}) if op.kind == INPUT else _NOTHING
            self._num_ops[name] = self._stage[name] = 0
            self._apart_reads[name] = self._unfused_reads[name] = _NOTHING
            return
        if self._is_from_call(op):
            self._from_call.add(name)
        operands = [operand for operand in op.inputs if operand in self._reads]
        self._combine(op, operands)
        if op.kind == ITEM and operands and operands[0] in self.results:
            self._reads[name] = self._loads[name] = frozenset({name})
            self._stage[name] = self._stage[operands[0]]
            self._num_ops[name] = 0
            self._apart_reads[name] = self._unfused_reads[name] = _NOTHING
        elif self._is_kernel(op):
            self.read_by[name] = self._reads[name]
            items = [user for user in self.users.get(name, ()) if self.op[user].kind == ITEM]
            self.results[name] = items or [name]
            self.read_apart[name] = self._apart_reads[name]
            if op.kind == SCATTER:  # its first operand is copied, into the buffer that it writes
                elements = [self._reads[o] for o in operands if o != op.inputs[0]]
                self.read_apart[name] = _NOTHING.union(*elements)
            self._read_unfused[name] = self._unfused_reads[name]
            self._reads[name] = self._loads[name] = frozenset({name})
            self._num_ops[name] = 0
            self._apart_reads[name] = self._unfused_reads[name] = _NOTHING
            self._dear.discard(name)

    def _combine(self, op: Op, operands: list[str]) -> None:
        """Buffers, number of ops and stage of the op, as if it had no buffer of its own."""
        if len(operands) == 1:  # the common case, faster
            (name,) = operands
            self._reads[op.name] = self._reads[name]
            self._loads[op.name] = self._loads[name]
            self._num_ops[op.name] = 1 + self._num_ops[name]
            self._stage[op.name] = self._stage[name] + (name in self._from_call)
            self._apart_reads[op.name] = self._apart_reads[name]
            self._unfused_reads[op.name] = self._unfused_reads[name]
        else:
            self._reads[op.name] = _NOTHING.union(*[self._reads[name] for name in operands])
            self._loads[op.name] = _NOTHING.union(*[self._loads[name] for name in operands])
            self._num_ops[op.name] = 1 + sum([self._num_ops[name] for name in operands])
            stages = [self._stage[name] + (name in self._from_call) for name in operands]
            self._stage[op.name] = max(stages, default=0)
            apart = [self._apart_reads[name] for name in operands]
            self._apart_reads[op.name] = _NOTHING.union(*apart)
            unfused = [self._unfused_reads[name] for name in operands]
            self._unfused_reads[op.name] = _NOTHING.union(*unfused)
        if op.own_loops:
            self._apart_reads[op.name] = self._unfused_reads[op.name] = self._reads[op.name]
            loads = itertools.product(self._loads[op.name], (op.name,), range(op.places))
            self._loads[op.name] = frozenset(loads)
        elif op.merges_dims:
            self._unfused_reads[op.name] = self._reads[op.name]
        if op.dear or not self._dear.isdisjoint(operands):
            self._dear.add(op.name)
        by_dim = op.own_loops or op.kind == REDUCTION or any(map(self._has_loops_by_dim, operands))
        if by_dim or (op.broadcasts and any(map(self._has_elements, operands))):
            self._loops_by_dim.add(op.name)

    def _has_loops_by_dim(self, name: str) -> bool:
        return name in self._loops_by_dim and name not in self._from_call

    def _has_elements(self, name: str) -> bool:
        """Whether a value is or reads a buffer of more than one element, or counts them."""
        if self.op[name].kind == CONSTANT:
            return False
        loads = [load[0] if isinstance(load, tuple) else load for load in self._loads[name]]
        return any(self.op[load].bytes > _ONE_ELEMENT for load in loads if load in self.op)

    def _is_from_call(self, op: Op) -> bool:
        if op.kind == VIEW:
            return op.inputs[0] in self._from_call
        if op.kind == ITEM:
            return op.inputs[0] in self.op and self.op[op.inputs[0]].kind == CALL
        return op.kind == CALL

    def _is_kernel(self, op: Op) -> bool:
        if op.kind == VIEW:
            return False
        if op.kind in _KERNELS or op.name in self.parts:
            return True
        readers = self._readers_through_views(op.name)
        if op.name in self.kept or any(self.op[name].kind == CALL for name in readers):
            return op.kind != CONSTANT or op.name in self.kept
        num_loads = len(self._loads[op.name])
        if len(readers) < 2:
            expanded = any(self.op[name].bytes > _EXPANDED * op.bytes for name in readers)
            return num_loads > _MOST_READS[op.on_cpu] or (expanded and op.name in self._dear)
        many_ops = self._num_ops[op.name] > _MANY_OPS[op.on_cpu]
        return num_loads > _MANY_READS or many_ops or op.name in self._dear

    def _readers_through_views(self, name: str) -> list[str]:
        found: list[str] = []
        for user in self.users.get(name, ()):
            is_view = self.op[user].kind == VIEW
            found.extend(self._readers_through_views(user) if is_view else [user])
        return found

    def _bases_of(self, names: Iterable[str]) -> set[str]:
        return {base for name in names for base in self._bases(name)}

    def _bases(self, name: str) -> list[str]:
        """The values that a view shows, which are several if that is of a concatenation."""
        op = self.op[name]
        if op.kind != VIEW or op.inputs[0] not in self.op:
            return [name]
        shown = op.inputs if op.concatenates else op.inputs[:1]
        return [base for operand in shown for base in self._bases(operand)]

    def is_never_overwritten(self, buffer: str) -> bool:
        """Whether a scatter wrote the buffer, or it is a concatenation's."""
        return buffer in self.parts or (buffer in self.op and self.op[buffer].kind == SCATTER)

    def fused_away(self) -> set[str]:
        """The buffers that only kernels of their own stage read (rule 5)."""
        return {
            buffer
            for buffer in self.readers.keys() & self.read_by.keys()
            if self.op[buffer].kind not in (CALL, SCATTER)
            if buffer not in self.kept and buffer not in self.parts
            if all(
                self.op[kernel].kind != CALL
                and self._are_one_stage(buffer, kernel)
                and buffer not in self._read_unfused[kernel]
                and not self._loops_differ(buffer, kernel)
                for kernel in self.readers[buffer]
            )
        }

    def _are_one_stage(self, buffer: str, kernel: str) -> bool:
        """Whether the kernel that writes the buffer may run as one with the other that reads it."""
        return (
            self._stage[kernel] == self._stage[buffer]
            or self._calls_before[kernel] == self._calls_before[buffer]
        )

    def _loops_differ(self, buffer: str, kernel: str) -> bool:
        """Whether a kernel cannot run in the loop that writes a buffer it reads.

        Inductor makes one loop of those over several dims where all that a kernel reads lies as
        what it writes (``simplify_and_reorder``), before it fuses kernels. On a CPU a reduction
        needs the loop over its rows (``CppScheduling.can_fuse_vertical``), and so it ends that
        loop, for itself and for what comes after it.
        """
        return self._is_flat(buffer) and any(map(self._ends_flat_loop, self._with_behind(kernel)))

    def _with_behind(self, kernel: str) -> Iterator[str]:
        yield kernel
        yield from self._behind(kernel)

    def _is_flat(self, buffer: str) -> bool:
        op = self.op[buffer]
        return op.on_cpu and op.kind == POINTWISE and buffer not in self._loops_by_dim

    def _ends_flat_loop(self, kernel: str) -> bool:
        reads = self.read_by[kernel] & self.read_by.keys()
        return self.op[kernel].kind == REDUCTION and any(map(self._is_flat, reads))

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
            return [(kernel,) for kernel in self.read_by]
        calls = {kernel for kernel in self.read_by if self.op[kernel].kind in (CALL, SCATTER)}
        return fused_groups(self.read_by, self._writer, lambda kernel: self.op[kernel].numel, calls)

    def run_as_one(self, kernel: str, other: str, group: tuple[str, ...], buffer: str) -> bool:
        """Whether Inductor may fuse two kernels because both read the buffer."""
        if not self.op[kernel].on_cpu:
            return other in group
        stage = self._stage[kernel]
        if self._stage[other] != stage or self.op[other].kind == CALL:
            return False
        before, others = self._behind(kernel), self._behind(other)
        if other in before:
            return False
        apart, is_reduction = buffer in self.read_apart[other], self.op[other].kind == REDUCTION
        if apart == is_reduction:
            return not apart or self._continues(kernel, self._writer.get(buffer, ""))
        # A loop over rows has reductions of the rows in it, and what reads one element of each, if
        # they follow the same kernel as the others.
        return not before.isdisjoint(others)

    def _continues(self, kernel: str, writer: str) -> bool:
        """Whether a pointwise kernel runs as one with the one that wrote its operand.

        Then what else reads the operand, in loops of its own, comes after both.
        """
        if not writer or self.op[writer].kind != POINTWISE:
            return False
        before = self._behind(kernel)
        return writer in before and not any(writer in self._behind(k) for k in before)

    def _behind(self, kernel: str) -> set[str]:
        """The kernels of the same stage whose results a kernel reads, directly or not."""
        stage = self._stage[kernel]
        found: set[str] = set()
        stack = [kernel]
        while stack:
            writers = {self._writer.get(buffer, "") for buffer in self.read_by[stack.pop()]}
            new = {k for k in writers - found if k and self._stage[k] >= stage}
            found |= new
            stack += new
        return found
