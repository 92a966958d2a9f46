"""What memory Inductor's Triton kernels take, besides what a schedule says of their buffers.

A kernel of several fused operations holds in registers what only it reads, with one exception: a
reduction over long rows runs as loops over each row, and a value that one loop computes and a later
one reads is written to memory in between. Inductor estimates such buffers itself before it writes a
kernel.

A *mix-order reduction* is one kernel that reduces over rows and over columns. Its sums over columns
are partial sums of a number of rows each, in a workspace, and a second reduction adds them up.

Source: torch/_inductor/codegen/simd_kernel_features.py (``MemoryEstimator``), codegen/simd.py
(``_codegen_mix_order_reduction``), choices.py (``should_use_persistent_reduction``).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.codegen.simd_kernel_features import (
    EnableReduction,
    MemoryEstimator,
    SIMDKernelFeatures,
)
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.runtime_utils import last_power_of_2
from torch._inductor.scheduler import (
    FusedMixOrderReductions,
    FusedSchedulerNode,
    MixOrderReduction,
    SchedulerNode,
)
from torch._inductor.virtualized import V

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.choices.InductorChoices.should_use_persistent_reduction"
        "(features, cooperative_reduction)",
        "torch._inductor.codegen.cuda_combined_scheduling.CUDACombinedScheduling",
        "torch._inductor.codegen.simd.SIMDScheduling.generate_node_schedule(nodes, numel, rnumel)",
        "torch._inductor.codegen.simd_kernel_features.EnableReduction",
        "torch._inductor.codegen.simd_kernel_features.MemoryEstimator(features, groups)",
        "torch._inductor.codegen.simd_kernel_features.SIMDKernelFeatures"
        "(node_schedule, numel, reduction_numel)",
        "torch._inductor.config.triton.mix_order_reduction_split_size",
        "torch._inductor.runtime.hints.DeviceProperties.create",
        "torch._inductor.runtime.runtime_utils.last_power_of_2",
        "torch._inductor.scheduler.FusedMixOrderReductions",
        "torch._inductor.scheduler.FusedSchedulerNode",
        "torch._inductor.scheduler.MixOrderReduction.get_numel_rnumel",
        "torch._inductor.scheduler.Scheduler.get_backend",
        "torch._inductor.scheduler.SchedulerNode",
        "torch._inductor.virtualized.V",
    ),
)
_SPLITS_PER_MULTIPROCESSOR = 8
_SPLIT_ROWS = (16, 128)  # the fewest and the most rows of a partial sum


def is_triton_kernel(node: Any) -> bool:
    """Whether a scheduler's node becomes one Triton kernel, as far as this file knows them."""
    device = node.get_device()
    known = type(node) in (SchedulerNode, FusedSchedulerNode, FusedMixOrderReductions)
    return known and device is not None and device.type == "cuda"


def buffers_between_loops(node: Any) -> Set[str]:
    """The buffers that a kernel writes and itself reads again in a later loop."""
    if type(node) is FusedMixOrderReductions or not node.is_reduction():
        return frozenset()
    nodes = node.get_nodes()
    _, (numel, rnumel) = max(nodes, key=lambda n: int(n.is_reduction())).group
    backend = node.scheduler.get_backend(node.get_device())
    backend = getattr(backend, "_triton_scheduling", backend)
    order = backend.generate_node_schedule(nodes, numel, rnumel)
    if EnableReduction not in order:  # one loop
        return frozenset()
    features = SIMDKernelFeatures(order, numel, rnumel)
    if V.choices.should_use_persistent_reduction(features, False):
        return frozenset()
    return frozenset(MemoryEstimator(features, (numel, rnumel)).must_keep_buffers)


def partial_sums(node: Any) -> int:
    """The elements of a kernel's workspace, which are float32; 0 if it has none."""
    if type(node) is not FusedMixOrderReductions:
        return 0
    rows, columns = map(_hint, MixOrderReduction.get_numel_rnumel(node.node1))
    split_rows = config.triton.mix_order_reduction_split_size
    if split_rows is None:
        processors: Any = DeviceProperties.create(node.get_device()).multi_processor_count
        fewest, most = _SPLIT_ROWS
        split_rows = last_power_of_2(rows // (processors * _SPLITS_PER_MULTIPROCESSOR))
        split_rows = min(most, max(fewest, split_rows))
    count = sum(part.is_reduction() for part in node.node2.get_nodes())
    return int(count * columns * -(-rows // split_rows))


def _hint(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size, fallback=1))


def probe() -> None:
    APIS.require()
    fields = CUDACombinedScheduling.__init__.__code__.co_names
    APIS.expect("_triton_scheduling" in fields, "CUDACombinedScheduling has other schedulers")
