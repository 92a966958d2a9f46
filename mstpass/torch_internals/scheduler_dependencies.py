"""Keep what reads a loop's results behind the loop, while Inductor fuses.

A loop writes into buffers that were there before it, and the scheduler knows its results under new
names, by which their readers wait for it. Where kernels of compatible shapes are tried for fusion
on the CPU, ``SchedulerNode.recompute_size_and_body`` reads once more off the body what a kernel
reads, and there the old names stand: 2.11 forgets the new ones, 2.13 unless the kernel has been
ordered by hand as well. The reader may then be fused into a kernel before the loop, and reads what
is not yet written. (torch/_inductor/scheduler.py, codegen/cpp.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode


@contextmanager
def mutations_kept() -> Iterator[None]:
    """Within it kernels keep the new names."""
    recompute = SchedulerNode.recompute_size_and_body

    def kept(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        added = [dep for dep in self.read_writes.reads if isinstance(dep, WeakDep | StarDep)]
        recompute(self, *args, **kwargs)
        found = self.read_writes
        for dep in added:
            found = found.with_read(dep)
        self.set_read_writes(found.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = kept  # type: ignore[method-assign]
    try:
        yield
    finally:
        SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign]
