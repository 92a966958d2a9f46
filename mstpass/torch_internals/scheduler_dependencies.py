"""Inductor's pass before fusion that keeps kernels behind the loops whose results they read.

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

from collections.abc import Callable
from typing import Any

from torch._inductor.dependencies import ReadWrites, StarDep, WeakDep
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.compile_fx import CustomSchedulerPass, key_of
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.config._pre_fusion_custom_pass",
        "torch._inductor.scheduler.BaseSchedulerNode.get_nodes",
        "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",
        "torch._inductor.scheduler.SchedulerNode.set_read_writes",
        "torch._inductor.dependencies.ReadWrites.with_read",
        "torch._inductor.dependencies.ReadWrites.rename",
        "torch._inductor.dependencies.StarDep",
        "torch._inductor.dependencies.WeakDep",
        "torch.utils._ordered_set.OrderedSet",
    ),
)


class KeepNames(CustomSchedulerPass):
    """From now on, kernels keep the new names of what they read; the user's pass runs first.

    Attributes:
        graphs: how many it was called with.
    """

    def __init__(self, users_pass: Callable[..., Any] | None = None):
        self.users_pass = users_pass
        self.graphs = 0

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        self.graphs += 1
        if self.users_pass is not None:
            nodes = self.users_pass(nodes)
        for node in nodes:
            for kernel in node.get_nodes():
                if isinstance(kernel, SchedulerNode):
                    keep_names(kernel)
        return nodes

    def uuid(self) -> Any:
        return key_of(self.users_pass)


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
