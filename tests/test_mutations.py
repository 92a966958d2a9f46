"""Inductor's kernels keep waiting for the loops whose results they read."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.dependencies import ReadWrites, StarDep
from torch.utils._ordered_set import OrderedSet

from mstpass.graph.own_ops import materialize
from mstpass.torch_internals.scheduler_mends import keep_names
from tests.checks import joint_graph


class _Kernel:
    """It reads ``buf1`` as a loop has left it, which is ``buf2``."""

    def __init__(self) -> None:
        self.mutation_renames = {"buf1": "buf2"}
        self.set_read_writes(_reads("buf2"))

    def recompute_size_and_body(self) -> None:
        self.set_read_writes(_reads("buf1"))

    def set_read_writes(self, found: ReadWrites) -> None:
        self.read_writes = found


def _reads(*names: str) -> ReadWrites:
    reads = OrderedSet(StarDep(name) for name in names)
    return ReadWrites(reads, OrderedSet(), OrderedSet())  # type: ignore[arg-type]


def test_a_kernel_that_is_read_again_keeps_the_new_names() -> None:
    kernel: Any = _Kernel()
    kernel.recompute_size_and_body()
    assert {dep.name for dep in kernel.read_writes.reads} == {"buf1"}  # as Inductor has it
    kernel, other = _Kernel(), _Kernel()
    keep_names(kernel)
    for each in (kernel, other):
        each.recompute_size_and_body()
    assert {dep.name for dep in kernel.read_writes.reads} == {"buf2"}
    assert {dep.name for dep in other.read_writes.reads} == {"buf1"}, "no other kernel is changed"


def test_a_realized_value_is_the_value() -> None:
    graph, _ = joint_graph(lambda x: x.sin().exp().sum(), torch.randn(4, 8, requires_grad=True))
    (sine,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    node = materialize(sine)
    assert node.meta["val"] is not sine.meta["val"]
    assert node.meta["val"].shape == (4, 8)
    x = torch.randn(2, 2)
    assert torch.equal(node.target(x), x)  # type: ignore[operator]
