"""Simulate the memory of a compiled graph from its ops: the model of Inductor's buffers.

Nodes are not buffers. Which nodes Inductor gives a buffer, and how long that lives, is modelled by
six rules (sources: torch/_inductor/lowering.py and ir.py for 1 to 3, scheduler.py for the others):

1. *Kernels* are calls (matmuls, attention, loops, and all ops that the op table does not know),
   reductions, scatters, and those pointwise values that a call reads, that leave the graph, or that
   are read more than once and are slow to compute (``Op.dear``, or many reads or ops). Every other
   pointwise value is computed inside the kernels that read it and has no buffer.
2. A view shares the buffer of its base. Each item of a call's result has a buffer of its own.
3. A call may need a workspace while it runs. That of a loop is the peak of one chunk.
4. Buffers that no later kernel reads, and that do not leave the graph, are freed.
5. A buffer that only kernels of its own *stage* read is fused away. A stage is a stretch without a
   call in between. The buffer of a scatter stays, as its rows are written in any order.
6. A pointwise kernel or reduction may write its result into the buffer of an operand that has the
   same size and that it is the last to read.

Pseudo-code::

    alive = the freed inputs
    for kernels in the groups that run as one, in order:
        write over an operand where rule 6 allows it
        alive += their results;  this moment = alive + workspace
        alive -= what nobody reads any more

Ops are plain data (problem/op.py), so that a plan is simulated without a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from mstpass.memory.kernel_fusion import fused_groups
from mstpass.memory.timeline import HELD, Moment, Timeline
from mstpass.problem.op import CALL, CONSTANT, INPUT, ITEM, REDUCTION, SCATTER, VIEW, Op

_KERNELS = frozenset({CALL, REDUCTION, SCATTER})
_MANY_READS = 4  # config.realize_reads_threshold
_MANY_OPS = 30  # config.realize_opcount_threshold
_NOTHING = frozenset[str]()


def simulate_ops(
    ops: Sequence[Op], kept: Iterable[str], freed: Iterable[str] = (), fuse: bool = False
) -> Timeline:
    """The memory of one graph over its ops, in their order.

    Args:
        kept: names of the values that leave the graph.
        freed: names of the inputs that are freed after their last use, such as the saved values of
            a backward. Other inputs, such as parameters, do not count.
        fuse: kernels that read the same buffer run as one (kernel_fusion.py). They do in a loop's
            body; in a step schedule/delay_recomputation.py keeps most of them apart.
    """
    kernels = _Kernels(ops, kept, set(freed))
    return _Run(kernels, fuse).timeline()


def held_outputs(
    forward: Sequence[Op], outputs: Iterable[str], crossing: Set[str], backward: Sequence[Op]
) -> tuple[list[Op], list[str]]:
    """The forward's outputs, which the caller holds while the backward runs.

    Args:
        outputs: names of what the forward returns to the caller.
        crossing: names of the forward values that are inputs of the backward.

    Returns:
        New inputs for the backward, alive all the time: the outputs that do not cross to it. And
        the names of those that do cross: they are not freed after their last use.
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
    return list(held.values()), kept


def _is_view_in(op: Mapping[str, Op], name: str) -> bool:
    return op[name].kind == VIEW and op[name].inputs[0] in op


class _Kernels:
    """Which ops are kernels, and what each of them reads and writes (rules 1, 2 and 5).

    Attributes:
        kept: names of the buffers that leave the graph.
        read_by: of each kernel the buffers that it reads, in the order of the kernels.
        results: of each kernel the buffers that it writes.
        readers: of each buffer the kernels that read it.
    """

    def __init__(self, ops: Sequence[Op], kept: Iterable[str], freed: Set[str]):
        self.ops, self.freed = ops, freed
        self.op = {op.name: op for op in ops}
        self.users: dict[str, list[str]] = {}
        for op in ops:
            for name in op.inputs:
                self.users.setdefault(name, []).append(op.name)
        self.kept = {self._base(name) for name in kept if name in self.op}
        self.read_by: dict[str, frozenset[str]] = {}
        self.results: dict[str, list[str]] = {}
        self._from_call: set[str] = set()  # values in buffers that a call writes
        # Of each value, kernel or not: the buffers that it is computed from, how many ops that
        # takes, and its stage: the most calls on a path to it.
        self._reads: dict[str, frozenset[str]] = {}
        self._num_ops: dict[str, int] = {}
        self._stage: dict[str, int] = {}
        for op in ops:
            self._add(op)
        self.readers: dict[str, list[str]] = {}
        for kernel, read in self.read_by.items():
            for buffer in read:
                self.readers.setdefault(buffer, []).append(kernel)

    def _add(self, op: Op) -> None:
        name = op.name
        if op.kind == INPUT:
            self._reads[name] = frozenset({name} & self.freed)
            self._num_ops[name] = self._stage[name] = 0
            return
        if self._is_from_call(op):
            self._from_call.add(name)
        operands = [operand for operand in op.inputs if operand in self._reads]
        self._combine(op, operands)
        if op.kind == ITEM and operands and operands[0] in self.results:
            self._reads[name] = frozenset({name})
            self._stage[name] = self._stage[operands[0]]
            self._num_ops[name] = 0
        elif self._is_kernel(op):
            self.read_by[name] = self._reads[name]
            items = [user for user in self.users.get(name, ()) if self.op[user].kind == ITEM]
            self.results[name] = items or [name]
            self._reads[name] = frozenset({name})
            self._num_ops[name] = 0

    def _combine(self, op: Op, operands: list[str]) -> None:
        """Buffers, number of ops and stage of the op, as if it had no buffer of its own."""
        if len(operands) == 1:  # the common case, faster
            (name,) = operands
            self._reads[op.name] = self._reads[name]
            self._num_ops[op.name] = 1 + self._num_ops[name]
            self._stage[op.name] = self._stage[name] + (name in self._from_call)
        else:
            self._reads[op.name] = _NOTHING.union(*[self._reads[name] for name in operands])
            self._num_ops[op.name] = 1 + sum([self._num_ops[name] for name in operands])
            stages = [self._stage[name] + (name in self._from_call) for name in operands]
            self._stage[op.name] = max(stages, default=0)

    def _is_from_call(self, op: Op) -> bool:
        if op.kind == VIEW:
            return op.inputs[0] in self._from_call
        if op.kind == ITEM:
            return op.inputs[0] in self.op and self.op[op.inputs[0]].kind == CALL
        return op.kind == CALL

    def _is_kernel(self, op: Op) -> bool:
        if op.kind == VIEW:
            return False
        if op.kind in _KERNELS:
            return True
        readers = self._readers_through_views(op.name)
        if op.name in self.kept or any(self.op[name].kind == CALL for name in readers):
            return op.kind != CONSTANT or op.name in self.kept
        if len(readers) < 2:
            return False
        reads, num_ops = self._reads[op.name], self._num_ops[op.name]
        return op.dear or len(reads) > _MANY_READS or num_ops > _MANY_OPS

    def _readers_through_views(self, name: str) -> list[str]:
        found: list[str] = []
        for user in self.users.get(name, ()):
            is_view = self.op[user].kind == VIEW
            found.extend(self._readers_through_views(user) if is_view else [user])
        return found

    def _base(self, name: str) -> str:
        """The value that a view shows; any other value itself."""
        while self.op[name].kind == VIEW and self.op[name].inputs[0] in self.op:
            name = self.op[name].inputs[0]
        return name

    def fused_away(self) -> set[str]:
        """The buffers that only kernels of their own stage read (rule 5)."""
        return {
            buffer
            for buffer in self.readers.keys() & self.read_by.keys()
            if self.op[buffer].kind not in (CALL, SCATTER) and buffer not in self.kept
            if all(
                self.op[kernel].kind != CALL and self._stage[kernel] == self._stage[buffer]
                for kernel in self.readers[buffer]
            )
        }

    def groups(self, fuse: bool) -> list[tuple[str, ...]]:
        """The kernels that run as one, in order."""
        if not fuse:
            return [(kernel,) for kernel in self.read_by]
        writer = {name: kernel for kernel, names in self.results.items() for name in names}
        calls = {kernel for kernel in self.read_by if self.op[kernel].kind in (CALL, SCATTER)}
        return fused_groups(self.read_by, writer, lambda kernel: self.op[kernel].bytes, calls)


class _Run:
    """One run over the kernels: which buffers each of them allocates and frees."""

    def __init__(self, kernels: _Kernels, fuse: bool):
        self.kernels, self.op = kernels, kernels.op
        self.fused_away = kernels.fused_away()
        self.groups = kernels.groups(fuse)
        self.last_use: dict[str, int] = {}
        for i, group in enumerate(self.groups):
            for kernel in group:
                self.last_use.update(dict.fromkeys(kernels.read_by[kernel], i))
        self.alive = {op.name: op.bytes for op in kernels.ops if op.name in kernels.freed}
        self.now = sum(self.alive.values())  # bytes
        # First moment, and the first without the buffer; until it is freed, the end of the graph.
        self.lives = dict.fromkeys(self.alive, (0, len(self.groups)))

    def timeline(self) -> Timeline:
        dies_at: dict[int, list[str]] = {}
        for buffer, i in self.last_use.items():
            if buffer not in self.kernels.kept:
                dies_at.setdefault(i, []).append(buffer)
        moments: list[Moment] = []
        sizes: list[int] = []
        for i, group in enumerate(self.groups):
            dying = [buffer for buffer in dies_at.get(i, ()) if buffer in self.alive]
            born = self._allocate(i, group, dying)
            inner_bytes = max(self.op[kernel].inner_bytes for kernel in group)
            sizes.append(self.now + inner_bytes)
            moments += [Moment(kernel, self.now + inner_bytes) for kernel in group]
            unused = [b for b in born if b not in self.last_use and b not in self.kernels.kept]
            for buffer in (*dying, *unused):
                self._free(buffer, i + 1)
        peak = sizes.index(max(sizes)) if any(sizes) else len(self.groups)
        there = (
            Moment(b, self.op[b].bytes) for b, life in self.lives.items() if peak in range(*life)
        )
        alive_at_peak = tuple(sorted(there, key=lambda moment: -moment.bytes))
        return Timeline(tuple(moments), alive_at_peak, self.lives, self.op)

    def _allocate(self, i: int, group: tuple[str, ...], dying: list[str]) -> dict[str, int]:
        """Allocate the results of the group; what they are written over leaves ``dying``."""
        born: dict[str, int] = {}
        for kernel in group:
            results = [] if kernel in self.fused_away else self._results_read_outside(kernel, group)
            new = {name: size for name in results if (size := self.op[name].bytes)}
            operand = self._written_over(kernel, group, dying, list(new.values()))
            if operand is not None:
                dying.remove(operand)
                self._free(operand, i)
            born |= new
        self.alive |= born
        self.lives |= dict.fromkeys(born, (i, len(self.groups)))
        self.now += sum(born.values())
        return born

    def _free(self, buffer: str, end: int) -> None:
        self.now -= self.alive.pop(buffer)
        self.lives[buffer] = self.lives[buffer][0], end

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
        """The operand that the kernel's result may be written over (rule 6).

        No other kernel may read it, not even one that runs as one with this kernel.
        """
        if self.op[kernel].kind in (CALL, SCATTER):
            return None
        read_by = self.kernels.read_by
        shared = {name for other in group if other != kernel for name in read_by[other]}
        fitting = (b for b in dying if [self.alive[b]] == new_bytes and b not in shared)
        return next((buffer for buffer in fitting if buffer in read_by[kernel]), None)
