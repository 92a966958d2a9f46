"""Patch Inductor's scheduler: kernels that read a loop's results stay after the loop.

A loop writes into buffers that exist before it, and the scheduler knows its results under new
names, by which their readers wait for it. When the CPU backend tries to fuse kernels of compatible
shapes, ``SchedulerNode.recompute_size_and_body`` reads a kernel's operands from its body once more,
and finds the old names there: 2.11 forgets the new names; 2.13 does so unless the kernel has been
ordered by hand as well; 2.15 keeps them. The reader may then be fused into a kernel before the
loop, and reads what is not written yet. Source: torch/_inductor/scheduler.py, codegen/cpp.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.dependencies import ReadWrites, StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.patches import SharedPatch
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",
        "torch._inductor.scheduler.SchedulerNode.set_read_writes",
        "torch._inductor.dependencies.ReadWrites.with_read",
        "torch._inductor.dependencies.ReadWrites.rename",
        "torch._inductor.dependencies.StarDep",
        "torch._inductor.dependencies.WeakDep",
        "torch.utils._ordered_set.OrderedSet",
    ),
)


@contextmanager
def _names_kept() -> Iterator[None]:
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


mutations_kept = SharedPatch(_names_kept)  # within it, kernels keep the new names


def probe() -> None:
    APIS.require()
    annotated = (vars(cls).get("__annotations__", {}) for cls in SchedulerNode.__mro__)
    known = any("mutation_renames" in names for names in annotated)
    APIS.expect(known, "torch._inductor.scheduler.SchedulerNode has no mutation_renames")
    reads = ReadWrites(OrderedSet([StarDep("old")]), OrderedSet(), OrderedSet())
    renamed = reads.with_read(StarDep("other")).rename({"old": "new"})
    names = {dep.name for dep in renamed.reads}
    APIS.expect(names == {"new", "other"}, "ReadWrites renames otherwise")
    original = SchedulerNode.recompute_size_and_body
    with mutations_kept():
        patched = SchedulerNode.recompute_size_and_body is not original
    APIS.expect(patched, "SchedulerNode cannot be patched")
