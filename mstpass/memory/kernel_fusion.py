"""Which kernels of a loop's body Inductor fuses into one, and in which order these run.

Kernels that read the same buffer are fused if they are no calls, have the same size, and no call
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
    seen: set[int] = set()

    def visit(i: int) -> None:
        if i in seen:
            return
        seen.add(i)
        for kernel in groups[i]:
            for buffer in sorted(reads[kernel] & writer.keys()):
                visit(number[writer[buffer]])
        order.append(i)

    for i in range(len(groups)):
        visit(i)
    return [tuple(groups[i]) for i in order]
