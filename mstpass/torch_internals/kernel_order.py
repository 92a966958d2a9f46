"""The graph that Inductor schedules: its devices, and the order in which its kernels will run.

Source: torch/_inductor/memory.py (``reorder_for_peak_memory`` runs after the hook behind fusion, so
it has to run in it as well), graph.py.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.config.reorder_for_peak_memory",
        "torch._inductor.graph.GraphLowering.add_device_info",
        "torch._inductor.memory.reorder_for_peak_memory",
        "torch._inductor.virtualized.V",
        "torch.utils._ordered_set.OrderedSet",
    ),
)


def in_final_order(nodes: list[Any]) -> list[Any]:
    """The scheduler's nodes as Inductor orders them after this hook."""
    if not config.reorder_for_peak_memory or not nodes:
        return nodes
    scheduler = nodes[0].scheduler
    return reorder_for_peak_memory(
        nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        OrderedSet(V.graph.get_output_names()),
    )


def is_for_cpu() -> bool:
    """Whether all tensors of the graph that Inductor compiles now are on the CPU."""
    return all(kind == "cpu" for kind in V.graph.device_types)


def probe() -> None:
    APIS.require()
    annotated = "device_types" in GraphLowering.__init__.__code__.co_names
    APIS.expect(annotated, "GraphLowering has no device_types")
