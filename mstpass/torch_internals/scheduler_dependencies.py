"""Keep Inductor's kernels behind the loops whose results they read.

A loop writes into buffers that exist before it, and the scheduler knows its results under new
names, by which their readers wait for it. When the CPU backend tries to fuse kernels of compatible
shapes, ``SchedulerNode.recompute_size_and_body`` reads a kernel's operands from its body once more,
and finds the old names there: 2.11 forgets the new names; 2.13 does so unless the kernel has been
ordered by hand as well; 2.15 keeps them. The reader may then be fused into a kernel before the
loop, and reads what is not written yet. So each kernel of our graphs gets a method of its own; the
kernels of other graphs are as Inductor made them. Source: torch/_inductor/scheduler.py,
codegen/cpp.py.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.dependencies import ReadWrites, StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode
from torch.utils._ordered_set import OrderedSet

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


def keep_names(kernel: Any) -> None:
    """Let this kernel keep the new names when its operands are read from its body once more."""
    recompute = kernel.recompute_size_and_body

    def recompute_and_rename(*args: Any, **kwargs: Any) -> None:
        added = [dep for dep in kernel.read_writes.reads if isinstance(dep, WeakDep | StarDep)]
        recompute(*args, **kwargs)
        found = kernel.read_writes
        for dep in added:
            found = found.with_read(dep)
        kernel.set_read_writes(found.rename(kernel.mutation_renames))

    kernel.recompute_size_and_body = recompute_and_rename


def probe() -> None:
    APIS.require()
    annotated = (vars(cls).get("__annotations__", {}) for cls in SchedulerNode.__mro__)
    known = any("mutation_renames" in names for names in annotated)
    APIS.expect(known, "torch._inductor.scheduler.SchedulerNode has no mutation_renames")
    reads = ReadWrites(OrderedSet([StarDep("old")]), OrderedSet(), OrderedSet())
    renamed = reads.with_read(StarDep("other")).rename({"old": "new"})
    names = {dep.name for dep in renamed.reads}
    APIS.expect(names == {"new", "other"}, "ReadWrites renames otherwise")
