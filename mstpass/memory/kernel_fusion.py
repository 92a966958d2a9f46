"""Which kernels of a small graph Inductor runs as one, and in what order.

Kernels that are no calls and read the same buffer are fused, if their sizes agree and no call lies
between them (torch/_inductor/scheduler.py: ``fuse_nodes``, ``will_fusion_create_cycle``). What they
are made of is then computed before the first of them, and all their results are alive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

Kernel = str
Buffer = str


def fused_groups(
    reads: Mapping[Kernel, frozenset[Buffer]],
    writer: Mapping[Buffer, Kernel],
    numel_like: Callable[[Kernel], int],
    calls: Set[Kernel],
) -> list[tuple[Kernel, ...]]:
    """The kernels in groups that run as one, in the order in which these run.

    Args:
        reads: of each kernel, in the graph's order.
        writer: the kernel that a buffer comes from; buffers that are given have none.
        numel_like: equal for kernels that may run in one loop.
        calls: kernels that run alone.
    """
    behind = _behind(reads, writer)
    groups: list[list[Kernel]] = []
    for kernel, read in reads.items():
        group = None
        if kernel not in calls:
            group = next(
                (
                    g
                    for g in groups
                    if g[0] not in calls
                    and numel_like(g[0]) == numel_like(kernel)
                    and any(read & reads[other] or other in read for other in g)
                    and not _call_between(g, kernel, behind, calls)
                ),
                None,
            )
        if group is None:
            groups.append([kernel])
        else:
            group.append(kernel)
    return _in_order(groups, reads, writer)


def _behind(
    reads: Mapping[Kernel, frozenset[Buffer]], writer: Mapping[Buffer, Kernel]
) -> dict[Kernel, set[Kernel]]:
    """Of each kernel, all those it depends on."""
    behind: dict[Kernel, set[Kernel]] = {}
    for kernel, read in reads.items():
        behind[kernel] = set()
        for buffer in read & writer.keys():
            behind[kernel] |= {writer[buffer], *behind[writer[buffer]]}
    return behind


def _call_between(
    group: list[Kernel], kernel: Kernel, behind: dict[Kernel, set[Kernel]], calls: Set[Kernel]
) -> bool:
    """Whether the kernel depends on a call that depends on one of the group."""
    return any(behind[call] & set(group) for call in behind[kernel] & calls)


def _in_order(
    groups: list[list[Kernel]],
    reads: Mapping[Kernel, frozenset[Buffer]],
    writer: Mapping[Buffer, Kernel],
) -> list[tuple[Kernel, ...]]:
    """The groups by their first kernels, each behind all that it depends on."""
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
