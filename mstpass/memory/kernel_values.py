"""What a value is computed from, before it is known whether it has a buffer (memory/kernels.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mstpass.problem.op import CALL, REDUCTION, Op

NOTHING = frozenset[Any]()
Load = tuple[str, frozenset[Any]]  # a buffer, and at which place of it


@dataclasses.dataclass(slots=True)
class KernelValue:
    """What is known of one value, a kernel's or not. The sets are of names of buffers.

    Attributes:
        reads: what it is computed from.
        loads: the same with inputs that are not freed, and with each place where they are read.
        apart: those of ``reads`` that it reads in loops of its own.
        unfused: these, and those that it reads through a view that merges dims.
        num_ops: how many ops it takes to compute it from what it reads.
        stage: the most calls on a path to it.
        slow: it is in no buffer, and slow to compute.
        by_dim: Inductor keeps its loops apart, dim by dim; of others it makes one loop.
        loops_end: which loops it needs where nothing it reads is in a buffer (``Op.loops_end``).
        from_call: a call wrote its buffer.
    """

    reads: frozenset[str]
    loads: frozenset[Load]
    apart: frozenset[str]
    unfused: frozenset[str]
    num_ops: int = 0
    stage: int = 0
    slow: bool = False
    by_dim: bool = False
    loops_end: frozenset[int] = NOTHING
    from_call: bool = False

    def becomes_buffer(self, op: Op) -> None:
        """It is written to memory: what reads it reads that."""
        self.reads, self.loads = frozenset((op.name,)), frozenset(((op.name, NOTHING),))
        self.apart = self.unfused = NOTHING
        self.num_ops, self.slow, self.loops_end = 0, False, frozenset()


def combined(op: Op, operands: Sequence[KernelValue]) -> KernelValue:
    """The result of an op, as if it had no buffer of its own."""
    if len(operands) == 1:  # the common case, faster
        (one,) = operands
        value = KernelValue(one.reads, one.loads, one.apart, one.unfused)
        value.num_ops, value.stage = 1 + one.num_ops, one.stage + one.from_call
        value.slow, value.by_dim = op.slow or one.slow, one.by_dim and not one.from_call
        value.loops_end = one.loops_end
    else:
        value = KernelValue(
            NOTHING.union(*[one.reads for one in operands]),
            NOTHING.union(*[one.loads for one in operands]),
            NOTHING.union(*[one.apart for one in operands]),
            NOTHING.union(*[one.unfused for one in operands]),
        )
        value.num_ops = 1 + sum([one.num_ops for one in operands])
        value.stage = max([one.stage + one.from_call for one in operands], default=0)
        value.slow = op.slow or any(one.slow for one in operands)
        value.by_dim = any(one.by_dim and not one.from_call for one in operands)
        value.loops_end = NOTHING.union(*[one.loops_end for one in operands])
    if op.loops_end:
        value.loops_end |= frozenset(op.loops_end)
    if op.own_loops:
        value.apart = value.unfused = value.reads
        value.loads = frozenset(
            _load_at(load, op, place) for load in value.loads for place in range(op.places)
        )
    elif op.merges_dims:
        value.unfused = value.reads
        value.loads = frozenset((buffer, places | {(op.name, 0)}) for buffer, places in value.loads)
    if op.own_loops or op.kind == REDUCTION:
        value.by_dim = True
    value.from_call = op.kind == CALL
    return value


def repeated(value: KernelValue, dims: Sequence[int] | None) -> KernelValue:
    """The value where it is repeated along dims, counted from the last: no shift there moves it."""
    if not dims:
        return value
    still = {(dim, None) for dim in dims}
    loads = frozenset([(buffer, places | still) for buffer, places in value.loads])
    return dataclasses.replace(value, loads=loads)


def _load_at(load: Load, op: Op, number: int) -> Load:
    """What an op reads elsewhere of what its operand reads: once for each place, not for each op.

    Source: ``OpCounterCSE.load`` in torch/_inductor/ops_handler.py.
    """
    buffer, places = load
    if op.transposed is not None:
        sizes, order = op.transposed
        back = tuple(sizes[dim] for dim in order), tuple(map(order.index, range(len(order))))
        here, there = {("order", op.transposed)}, {("order", back)}
        return buffer, places - there if there <= places else places | here
    if op.shift is None:
        return buffer, places | {(op.name, number)}
    dim, start = op.shift
    if (dim, None) in places:
        return load
    before = {place for place in places if place[0] == dim}
    start += sum(place[1] for place in before)
    return buffer, (places - before) | ({(dim, start)} if start else NOTHING)
