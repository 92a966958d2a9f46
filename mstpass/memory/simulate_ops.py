"""The memory of a compiled graph, simulated: which buffers are alive while each kernel runs.

Nodes are not buffers. What Inductor makes of them is modelled by five rules (sources:
torch/_inductor/lowering.py and ir.py for the first three, scheduler.py for the others):

- *Kernels* are calls (matmuls, attention, loops, whatever the op table does not know), reductions,
  scatters, and pointwise values that a call reads, that leave the graph, or that are read more than
  once and are dear. All other pointwise values are computed where they are read and have no buffer.
- A view is alive as what it is a view of; each item of a call's results has a buffer of its own.
- A call may need a workspace while it runs: a loop, what one chunk needs.
- A buffer that only kernels of its own *stage* read, with no call between, is fused away; but for
  that of a scatter, whose rows come in any order.
- A pointwise kernel may write over an operand of its size that it is the last to read.

A buffer lives from its kernel to the last one that reads it. The ops are plain data, so that plans
are simulated without a graph; memory/simulate_graph.py makes them from one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from mstpass.memory.kernel_fusion import fused_groups
from mstpass.memory.timeline import HELD, Moment, Timeline
from mstpass.problem.op import CALL, CONSTANT, INPUT, ITEM, REDUCTION, SCATTER, VIEW, Op

_KERNELS = frozenset({CALL, REDUCTION, SCATTER})
_DEAR_READS = 4  # config.realize_reads_threshold
_DEAR_OPS = 30  # config.realize_opcount_threshold
_NOTHING = frozenset[str]()


def simulate_ops(
    ops: Sequence[Op], kept: Iterable[str], freed: Iterable[str] = (), fuse: bool = False
) -> Timeline:
    """The memory of one graph over its ops, in their order.

    Args:
        kept: what leaves the graph.
        freed: inputs that are alive from the beginning to their last use, such as saved values in a
            backward. Others, such as parameters, do not count.
        fuse: kernels that read alike run as one (fusion.py). So they do in a loop's body; in a step
            the order of schedule/delay_recomputation.py keeps most of them apart.
    """
    return _Simulation(ops, kept, set(freed), fuse).run()


def held_outputs(
    forward: Sequence[Op], outputs: Iterable[str], crossing: Set[str], backward: Sequence[Op]
) -> tuple[list[Op], list[str]]:
    """What the caller holds of a forward while its backward runs: what it returned to him.

    Args:
        crossing: forward values that are inputs of the backward.

    Returns:
        New inputs for the backward, alive all the time: outputs that do not cross to it. And names
        of those that do: they are not freed after their last use.
    """
    op = {o.name: o for o in forward}
    taken = {o.name for o in backward}  # a name that backward computes again is another value
    held: dict[str, Op] = {}
    kept: list[str] = []
    for name in outputs:
        while name in op and op[name].kind == VIEW and op[name].inputs[0] in op:
            name = op[name].inputs[0]
        if name in crossing:
            kept.append(name)
        elif name in op and op[name].kind != INPUT:
            own = f"{name}{HELD}" if name in taken else name
            held[name] = Op(own, op[name].bytes, kind=INPUT)
    return list(held.values()), kept


class _Simulation:
    def __init__(self, ops: Sequence[Op], kept: Iterable[str], freed: Set[str], fuse: bool):
        self.ops = ops
        self.freed = freed
        self.fuse = fuse
        self.op = {op.name: op for op in ops}
        self.users: dict[str, list[str]] = {}
        for op in ops:
            for name in op.inputs:
                self.users.setdefault(name, []).append(op.name)
        self.kept = {self._base(name) for name in kept if name in self.op}
        self.results: dict[str, list[str]] = {}  # the buffers that a kernel writes
        self.from_call: set[str] = set()  # values in buffers that a call writes
        self.reads: dict[str, frozenset[str]] = {}  # buffers that a value is made from
        self.read_by_kernel: dict[str, frozenset[str]] = {}
        self.kernels_reading: dict[str, list[str]] = {}
        self.num_ops: dict[str, int] = {}
        self.stage: dict[str, int] = {}

    def run(self) -> Timeline:
        self._find_kernels()
        fused = self._fused_away()
        groups = self._groups()
        last_use: dict[str, int] = {}
        for i, group in enumerate(groups):
            for kernel in group:
                last_use.update(dict.fromkeys(self.read_by_kernel[kernel], i))
        dies_at: dict[int, list[str]] = {}
        for buffer, i in last_use.items():
            if buffer not in self.kept:
                dies_at.setdefault(i, []).append(buffer)
        alive = {op.name: op.bytes for op in self.ops if op.name in self.freed}
        now = sum(alive.values())
        moments: list[Moment] = []
        sizes: list[int] = []
        lives = dict.fromkeys(alive, (0, len(groups)))  # the first moment, and the one after
        for i, group in enumerate(groups):
            dying = [b for b in dies_at.get(i, ()) if b in alive]
            born: dict[str, int] = {}
            for kernel in group:
                results = [] if kernel in fused else self._read_outside(kernel, group)
                new = {name: size for name in results if (size := self.op[name].bytes)}
                over = self._written_over(kernel, group, dying, list(new.values()), alive)
                if over is not None:
                    dying.remove(over)
                    now -= alive.pop(over)
                    lives[over] = lives[over][0], i
                born |= new
            alive |= born
            lives |= dict.fromkeys(born, (i, len(groups)))
            now += sum(born.values())
            inner_bytes = max(self.op[kernel].inner_bytes for kernel in group)
            sizes.append(now + inner_bytes)
            moments += [Moment(kernel, now + inner_bytes) for kernel in group]
            unused = [b for b in born if b not in last_use and b not in self.kept]
            for buffer in (*dying, *unused):
                now -= alive.pop(buffer)
                lives[buffer] = lives[buffer][0], i + 1
        peak = sizes.index(max(sizes)) if any(sizes) else len(groups)
        there = (Moment(b, self.op[b].bytes) for b, life in lives.items() if peak in range(*life))
        alive_there = tuple(sorted(there, key=lambda m: -m.bytes))
        return Timeline(tuple(moments), alive_there, lives, self.op)

    def _groups(self) -> list[tuple[str, ...]]:
        """Kernels that run as one, in order."""
        if not self.fuse:
            return [(kernel,) for kernel in self.read_by_kernel]
        writer = {name: kernel for kernel, names in self.results.items() for name in names}
        calls = {k for k in self.read_by_kernel if self.op[k].kind in (CALL, SCATTER)}
        return fused_groups(self.read_by_kernel, writer, lambda k: self.op[k].bytes, calls)

    def _read_outside(self, kernel: str, group: tuple[str, ...]) -> list[str]:
        """The results but for those that only kernels read that run as one with this one."""
        if len(group) == 1:
            return self.results[kernel]
        inside = set(group)
        return [
            name
            for name in self.results[kernel]
            if name in self.kept or not inside.issuperset(self.kernels_reading.get(name, ()))
        ]

    def _written_over(
        self,
        kernel: str,
        group: tuple[str, ...],
        dying: list[str],
        born: list[int],
        alive: dict[str, int],
    ) -> str | None:
        """An operand that nothing else reads, not even a kernel that runs as one with this one."""
        if self.op[kernel].kind in (CALL, SCATTER):
            return None
        shared = {name for other in group if other != kernel for name in self.read_by_kernel[other]}
        fitting = (b for b in dying if [alive[b]] == born and b not in shared)
        return next((b for b in fitting if b in self.read_by_kernel[kernel]), None)

    # ---- kernels and buffers -------------------------------------------------------------------
    def _find_kernels(self) -> None:
        for op in self.ops:
            if op.kind == INPUT:
                self.reads[op.name] = frozenset({op.name} & self.freed)
                self.num_ops[op.name] = self.stage[op.name] = 0
                continue
            if self._is_from_call(op):
                self.from_call.add(op.name)
            operands = [name for name in op.inputs if name in self.reads]
            self._follow(op, operands)
            if op.kind == ITEM and operands and operands[0] in self.results:
                self.reads[op.name] = frozenset({op.name})
                self.stage[op.name] = self.stage[operands[0]]
                self.num_ops[op.name] = 0
            elif self._is_kernel(op):
                self.read_by_kernel[op.name] = self.reads[op.name]
                items = [n for n in self.users.get(op.name, ()) if self.op[n].kind == ITEM]
                self.results[op.name] = items or [op.name]
                self.reads[op.name] = frozenset({op.name})
                self.num_ops[op.name] = 0

    def _follow(self, op: Op, operands: list[str]) -> None:
        """What the op takes over from its operands, unless it is a kernel."""
        if len(operands) == 1:
            (name,) = operands
            self.reads[op.name] = self.reads[name]
            self.num_ops[op.name] = 1 + self.num_ops[name]
            self.stage[op.name] = self.stage[name] + (name in self.from_call)
        else:
            self.reads[op.name] = _NOTHING.union(*[self.reads[name] for name in operands])
            self.num_ops[op.name] = 1 + sum([self.num_ops[name] for name in operands])
            behind = [self.stage[name] + (name in self.from_call) for name in operands]
            self.stage[op.name] = max(behind, default=0)

    def _is_from_call(self, op: Op) -> bool:
        if op.kind == VIEW:
            return op.inputs[0] in self.from_call
        if op.kind == ITEM:
            return op.inputs[0] in self.op and self.op[op.inputs[0]].kind == CALL
        return op.kind == CALL

    def _is_kernel(self, op: Op) -> bool:
        if op.kind == VIEW:
            return False
        if op.kind in _KERNELS:
            return True
        readers = self._readers(op.name)
        if op.name in self.kept or any(self.op[name].kind == CALL for name in readers):
            return op.kind != CONSTANT or op.name in self.kept
        if len(readers) < 2:
            return False
        reads, num_ops = self.reads[op.name], self.num_ops[op.name]
        return op.dear or len(reads) > _DEAR_READS or num_ops > _DEAR_OPS

    def _readers(self, name: str) -> list[str]:
        """Users, seen through views."""
        found: list[str] = []
        for user in self.users.get(name, ()):
            found.extend(self._readers(user) if self.op[user].kind == VIEW else [user])
        return found

    def _base(self, name: str) -> str:
        """What a view shows."""
        while self.op[name].kind == VIEW and self.op[name].inputs[0] in self.op:
            name = self.op[name].inputs[0]
        return name

    def _fused_away(self) -> set[str]:
        """Buffers that only kernels of their own stage read."""
        for kernel, read in self.read_by_kernel.items():
            for buffer in read:
                self.kernels_reading.setdefault(buffer, []).append(kernel)
        return {
            buffer
            for buffer in self.kernels_reading.keys() & self.read_by_kernel.keys()
            if self.op[buffer].kind not in (CALL, SCATTER) and buffer not in self.kept
            if all(
                self.op[k].kind != CALL and self.stage[k] == self.stage[buffer]
                for k in self.kernels_reading[buffer]
            )
        }
