"""Inductor's pass before fusion, in which its scheduler is mended for the graphs of mstpass.

Each of our graphs, each kernel and each backend gets methods of its own; those of others are as
Inductor made them. Source: torch/_inductor/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from mstpass.torch_internals.compile_fx import CustomSchedulerPass, key_of
from mstpass.torch_internals.private_apis import PrivateApis
from mstpass.torch_internals.scheduler_dependencies import keep_names
from mstpass.torch_internals.symbols import count_hints
from mstpass.torch_internals.vectorized_cpp import mend_vectorized_cpp

APIS = PrivateApis(
    names=(
        "torch._inductor.config._pre_fusion_custom_pass",
        "torch._inductor.scheduler.BaseSchedulerNode.get_nodes",
        "torch._inductor.scheduler.SchedulerNode",
        "torch._inductor.virtualized.V",
    ),
)


class MendScheduler(CustomSchedulerPass):
    """Mends the scheduler of each graph that it is called with; the user's pass runs first.

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
        count_hints(V.graph)
        if nodes:
            mend_vectorized_cpp(nodes[0].scheduler)
        return nodes

    def uuid(self) -> Any:
        return key_of(self.users_pass)


def probe() -> None:
    APIS.require()
