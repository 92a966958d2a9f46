"""Which kernels Inductor fuses into one, and in which order these run.

Kernels are one where a value between them has no buffer (``in_order``). In a loop's body, kernels
that read the same buffer are fused besides, if they are no calls, have the same size, and no call
lies between them (torch/_inductor/scheduler.py: ``fuse_nodes``, ``will_fusion_create_cycle``). What
the group reads is then computed before its first kernel, and the results of all its kernels are
alive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

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
