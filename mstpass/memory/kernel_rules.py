"""The rules of memory/kernels.py, one by one; none of them needs PyTorch.

**Values**: what a value is computed from, before it is known whether it has a buffer.

**Fusion**: which kernels Inductor fuses into one, and in which order these run. Kernels are one
where a value between them has no buffer (``in_order``). In a loop's body, kernels that read the
same buffer are fused besides, if they are no calls, have the same size, and no call lies between
them (torch/_inductor/scheduler.py: ``fuse_nodes``, ``will_fusion_create_cycle``). What the group
reads is then computed before its first kernel, and the results of all its kernels are alive at
once.

**Concatenations**: which operands are computed in their places in the result. On a CPU, Inductor
gives a concatenation a buffer, and the kernels of its operands write into that, the first of them
once it is allocated (``ConcatKernel`` in torch/_inductor/ir.py). An operand that has a buffer
already, as an input or a view has, is copied.

**Scatters**: which of them wait for their rows (schedule/finished_graphs.py).

A scatter waits if that frees memory: if its rows are smaller than what they are computed from and
nothing else reads. That depends on what is saved: it is asked of the ops of one graph, by the
simulation of a plan as by the schedule of the finished graphs, so that both have equal peaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from mstpass.problem.op import CALL, CONSTANT, INPUT, POINTWISE, REALIZED, REDUCTION, SIZE, VIEW, Op
from mstpass.walk import walk, walk_once

NOTHING = frozenset[Any]()
Load = tuple[str, frozenset[Any]]  # a buffer, and at which place of it


@dataclasses.dataclass(slots=True)
class KernelValue:
    """What is known of one value, a kernel's or not. The sets are of names of buffers.

    Attributes:
        reads: what it is computed from.
        loads: the same with inputs that are not freed, and with each place where they are read.
        apart: those of ``reads`` that it reads in loops of its own.
        num_ops: how many ops it takes to compute it from what it reads.
        stage: the most calls on a path to it.
        slow: it is in no buffer, and slow to compute.
        loops_end: which loops it needs where nothing it reads is in a buffer (``Op.loops_end``).
        from_call: a call wrote its buffer.
    """

    reads: frozenset[str]
    loads: frozenset[Load]
    apart: frozenset[str]
    num_ops: int = 0
    stage: int = 0
    slow: bool = False
    loops_end: frozenset[int] = NOTHING
    from_call: bool = False

    def becomes_buffer(self, op: Op) -> None:
        """It is written to memory: what reads it reads that."""
        self.reads, self.loads = frozenset((op.name,)), frozenset(((op.name, NOTHING),))
        self.apart, self.loops_end = NOTHING, NOTHING
        self.num_ops, self.slow = 0, False


def combined(op: Op, operands: Sequence[KernelValue]) -> KernelValue:
    """The result of an op, as if it had no buffer of its own."""
    if len(operands) == 1:  # the common case, faster
        (one,) = operands
        value = KernelValue(one.reads, one.loads, one.apart)
        value.num_ops, value.stage = 1 + one.num_ops, one.stage + one.from_call
        value.slow = op.slow or one.slow
        value.loops_end = one.loops_end
    else:
        value = KernelValue(
            NOTHING.union(*[one.reads for one in operands]),
            NOTHING.union(*[one.loads for one in operands]),
            NOTHING.union(*[one.apart for one in operands]),
        )
        value.num_ops = 1 + sum([one.num_ops for one in operands])
        value.stage = max([one.stage + one.from_call for one in operands], default=0)
        value.slow = op.slow or any(one.slow for one in operands)
        value.loops_end = NOTHING.union(*[one.loops_end for one in operands])
    if op.loops_end:
        value.loops_end |= frozenset(op.loops_end)
    if op.own_loops:
        value.apart = value.reads
        value.loads = frozenset(_load_at(load, op) for load in value.loads)
    value.from_call = op.kind == CALL
    return value


def _load_at(load: Load, op: Op) -> Load:
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
        return buffer, places | {(op.name, 0)}
    dim, start = op.shift
    before = {place for place in places if place[0] == dim}
    start += sum(place[1] for place in before)
    return buffer, (places - before) | ({(dim, start)} if start else NOTHING)


Kernel = str
Buffer = str


def fused_groups(
    reads: Mapping[Kernel, frozenset[Buffer]],
    writer: Mapping[Buffer, Kernel],
    nest_of: Callable[[Kernel], tuple[int, bool]],
    calls: Set[Kernel],
) -> list[tuple[Kernel, ...]]:
    """The kernels in groups that run as one, in the order in which the groups run.

    Args:
        reads: the buffers that each kernel reads, in the graph's order.
        writer: the kernel that writes a buffer; inputs of the graph have none.
        nest_of: the same for kernels that may run in one loop nest.
        calls: kernels that always run alone.
    """
    dependencies = _dependencies(reads, writer)
    groups: list[list[Kernel]] = []

    def joins(group: list[Kernel], kernel: Kernel, read: frozenset[Buffer]) -> bool:
        return (
            group[0] not in calls
            and nest_of(group[0]) == nest_of(kernel)
            and any(read & reads[other] or other in read for other in group)
            and not _call_between(group, kernel, dependencies, calls)
        )

    for kernel, read in reads.items():
        group = None
        if kernel not in calls:
            group = next((group for group in groups if joins(group, kernel, read)), None)
        if group is None:
            groups.append([kernel])
        else:
            group.append(kernel)
    return _in_order(groups, reads, writer)


def in_order(
    reads: Mapping[Kernel, frozenset[Buffer]],
    writer: Mapping[Buffer, Kernel],
    fused_away: Set[Buffer],
) -> list[tuple[Kernel, ...]]:
    """Each kernel by itself, where Inductor runs it.

    Those that a value without a buffer joins run where the first of them does. What the others read
    is computed before them all, even if calls that come first in the graph could free memory.

    Args:
        fused_away: the buffers that only kernels read that run as one with their writers.
    """
    if not fused_away:
        return [(kernel,) for kernel in reads]
    group_of: dict[Kernel, list[Kernel]] = {}
    for kernel, read in reads.items():
        one = group_of[kernel] = [kernel]
        for buffer in read & fused_away:
            other = group_of[writer[buffer]]
            if other is not one:
                other += one
                group_of.update(dict.fromkeys(one, other))
                one = other
    place = {kernel: i for i, kernel in enumerate(reads)}
    groups = {id(group): sorted(group, key=place.__getitem__) for group in group_of.values()}
    ordered = _in_order(list(groups.values()), reads, writer)
    return [(kernel,) for group in ordered for kernel in group]


def _dependencies(
    reads: Mapping[Kernel, frozenset[Buffer]], writer: Mapping[Buffer, Kernel]
) -> dict[Kernel, set[Kernel]]:
    """Of each kernel, all kernels that it depends on, directly or not."""
    found: dict[Kernel, set[Kernel]] = {}
    for kernel, read in reads.items():
        found[kernel] = set()
        for buffer in read & writer.keys():
            found[kernel] |= {writer[buffer], *found[writer[buffer]]}
    return found


def _call_between(
    group: list[Kernel], kernel: Kernel, dependencies: dict[Kernel, set[Kernel]], calls: Set[Kernel]
) -> bool:
    """Whether the kernel depends on a call that depends on a kernel of the group."""
    return any(dependencies[call] & set(group) for call in dependencies[kernel] & calls)


def _in_order(
    groups: list[list[Kernel]],
    reads: Mapping[Kernel, frozenset[Buffer]],
    writer: Mapping[Buffer, Kernel],
) -> list[tuple[Kernel, ...]]:
    """The groups by their first kernels, each after all groups that it depends on."""
    number = {kernel: i for i, group in enumerate(groups) for kernel in group}
    order: list[int] = []
    entered: set[int] = set()
    for i in range(len(groups)):
        stack = [] if i in entered else [i]
        while stack:
            entered.add(stack[-1])
            waits_for = (
                number[writer[buffer]]
                for kernel in groups[stack[-1]]
                for buffer in sorted(reads[kernel] & writer.keys())
            )
            missing = next((group for group in waits_for if group not in entered), None)
            if missing is None:
                order.append(stack.pop())
            else:
                stack.append(missing)
    return [tuple(groups[i]) for i in order]


_COMPUTED = frozenset({POINTWISE, REALIZED, REDUCTION})


def in_place(
    op: Mapping[str, Op], users: Mapping[str, Sequence[str]], kept: Set[str]
) -> tuple[dict[str, Op], dict[str, frozenset[str]]]:
    """The operands that are computed in their places, and their concatenations, as other ops.

    The operand that is computed first has the bytes of the whole, and the others have none. Nor has
    the whole: it is a view of its operands, or the kernel that copies the others of them.

    Args:
        op: the ops of the graph, by name and in order.
        users: the names of those that read each, in order.
        kept: names of the values that leave the graph.

    Returns:
        The ops, and of each concatenation the operands that are in their places.
    """
    found: dict[str, Op] = {}
    parts_of: dict[str, frozenset[str]] = {}
    for whole in op.values():
        if not whole.concatenates or whole.kind == INPUT:  # which the forward has saved
            continue
        parts = frozenset(
            part
            for part in whole.inputs
            if part in op and part not in kept and part not in found
            if _is_placed(op, users, part)
        )
        parts_of[whole.name] = parts
        first = next((name for name in op if name in parts), "")
        for part in parts:
            size = whole.bytes if part == first else 0
            found[part] = dataclasses.replace(op[part], bytes=size)
        if len(parts) == len(whole.inputs):
            found[whole.name] = dataclasses.replace(whole, kind=VIEW, own_loops=True)
        else:
            size = 0 if parts else whole.bytes
            copies = dataclasses.replace(whole, kind=REALIZED, bytes=size, own_loops=True)
            found[whole.name] = copies
    return found, parts_of


def _is_placed(op: Mapping[str, Op], users: Mapping[str, Sequence[str]], part: str) -> bool:
    """Whether a value may be computed in a part of another one's buffer.

    A view or a call that reads it before fixes where it lies.
    """
    value = op[part]
    if value.kind not in _COMPUTED and not (value.kind == CALL and value.writes_anywhere):
        return False
    for user in users[part]:
        if op[user].concatenates:
            return True
        if op[user].kind in (VIEW, CALL):
            return False
    return True


def waits(
    scatter: Op, op: Mapping[str, Op], users: Mapping[str, Sequence[str]], freed: Set[str]
) -> bool:
    """Whether a scatter that may wait for its rows does, in a graph.

    Args:
        op: the ops of the graph, by name.
        users: the names of those that read each.
        freed: the inputs of the graph that are freed after their last use.
    """
    rows = scatter.inputs[-1]
    if rows not in op:
        return False
    in_kernel = lambda name: op[name].kind in (POINTWISE, VIEW)
    operands = lambda name: filter(op.__contains__, op[name].inputs) if in_kernel(name) else ()
    read = [*walk_once([rows], operands)]
    pointwise = set(filter(in_kernel, read))  # computed in the kernel of the rows
    others = (name for name in read if name not in pointwise)
    buffers = (n for n in others if n in freed or op[n].kind not in (INPUT, CONSTANT, SIZE))
    only_here = (b for b in buffers if pointwise.issuperset(readers_through_views(b, op, users)))
    return op[rows].bytes < sum(op[buffer].bytes for buffer in only_here)


def readers_through_views(
    name: str, op: Mapping[str, Op], users: Mapping[str, Sequence[str]]
) -> list[str]:
    """What reads a value, itself or by a view."""
    further = lambda user: users.get(user, ()) if op[user].kind == VIEW else ()
    return [user for user in walk(users.get(name, ()), further) if op[user].kind != VIEW]
