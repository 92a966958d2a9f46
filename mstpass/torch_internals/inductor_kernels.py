"""The kernels in Inductor's schedule: their order, their loops, and the memory that they need.

Source: torch/_inductor/memory.py (``reorder_for_peak_memory``), scheduler.py
(``mutation_real_name``), ir.py (``WhileLoop``), codegen/cpp.py (``codegen_outer_loop_node``,
``OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr``), codegen/simd_kernel_features.py
(``MemoryEstimator``), codegen/simd.py (``_codegen_mix_order_reduction``), choices.py
(``should_use_persistent_reduction``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import sympy
import torch
from torch._inductor import config, ir
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.codegen.simd_kernel_features import (
    EnableReduction,
    MemoryEstimator,
    SIMDKernelFeatures,
)
from torch._inductor.dependencies import WeakDep
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.runtime_utils import last_power_of_2
from torch._inductor.scheduler import (
    FusedMixOrderReductions,
    FusedSchedulerNode,
    MixOrderReduction,
    SchedulerNode,
)
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.versions import LostLoopError


def in_final_order(nodes: list[Any]) -> list[Any]:
    """The scheduler's nodes as Inductor orders them after the hook behind fusion."""
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


_BARRIER = getattr(ir, "OrderingBarrier", ())  # of torch 2.15: hands a buffer on, reads nothing


def check_loops(nodes: Sequence[Any], condition: str) -> None:
    """Check that the schedule runs a graph's loops, each before what reads its results.

    A loop writes into buffers that exist before it (loops/lowering.py), and nothing but the loop
    may touch them until it has run, but for a loop before it in whose results it writes its own. A
    scheduler that loses the names of what a loop writes could
    move a reader in front of it (scheduler_mends.py); gradients would then be wrong, and nothing
    would say so.

    Args:
        nodes: the scheduler's kernels, in their final order.
        condition: what the names of our loops' conditions begin with.

    Raises:
        LostLoopError: a loop is missing, or a kernel reads what it writes before it has run.
    """
    expected = sum(_is_call(node, condition) for node in V.graph.graph.nodes)
    read: set[str] = set()
    found = 0
    for part in (part for node in nodes for part in node.get_nodes()):
        if isinstance(part.node, _BARRIER):
            continue
        real_name, own = part.scheduler.mutation_real_name, set[str]()
        if _is_loop(part.node, condition):
            found += 1
            results = part.get_outputs()
            written = own = {real_name.get(n, n) for r in results for n in r.get_mutations()}
            early = sorted((written | {r.get_name() for r in results}) & read)
            if not written:
                raise LostLoopError("a loop in Inductor's schedule writes no buffer")
            if early:
                raise LostLoopError(f"Inductor reads {early[0]} before the loop that fills it")
        deps = part.read_writes.reads
        names = {d.name for d in deps if not isinstance(d, WeakDep)}
        read |= names.union(real_name.get(name, name) for name in names) - own
    if found != expected:
        raise LostLoopError(f"Inductor's schedule has {found} of a graph's {expected} loops")


def _is_call(node: Any, condition: str) -> bool:
    if node.target is not torch.ops.higher_order.while_loop:
        return False
    return str(node.args[0].target).startswith(condition)


def _is_loop(kernel: Any, condition: str) -> bool:
    if not isinstance(kernel, ir.WhileLoop):
        return False
    return str(getattr(kernel.cond_subgraph, "name", "")).startswith(condition)


# ---- C++ kernels --------------------------------------------------------------------------------
_MOST_INNER = 300  # iterations of the inner loop for one of the shared ones; above, nests run apart


def kernels_by_nest(node: Any) -> list[Sequence[Any]]:
    """The kernels that a node of the schedule is made of, those of one loop nest together."""
    if isinstance(node, OuterLoopFusedSchedulerNode):
        return [nest.get_nodes() for nest in node.get_outer_nodes()]
    return [node.get_nodes()]


def local_buffers(node: Any) -> set[str]:
    """Names of the values that are local buffers, which need next to no memory.

    On a CPU, Inductor puts loop nests with the same outer loops into one kernel, such as the
    maximum of each row, the sum of each row, and what is divided by it. A value that one nest
    writes and another reads is then a *local buffer* of a row, or a buffer in memory as if the
    nests were kernels of their own. It is local where each nest has just one loop inside of the
    shared ones, and the value is written and read in the order of its memory.
    """
    if not isinstance(node, OuterLoopFusedSchedulerNode):
        return set()
    shared = node.outer_loop_fusion_depth
    for kernels in kernels_by_nest(node):
        ranges = _ranges(kernels)
        if len(ranges) != shared + 1 or _runs_apart(ranges[:shared], ranges[shared]):
            return set()
    kernels = node.get_nodes()
    inside = {kernel.get_name() for kernel in kernels}
    return {
        kernel.get_outputs()[0].get_name()
        for kernel in kernels
        if not kernel.is_reduction() and _is_local(kernel, inside)
    }


def _ranges(kernels: Sequence[Any]) -> tuple[Any, ...]:
    """The sizes of a nest's loops, from the outside in."""
    _, (group, reduced) = max(kernels, key=lambda kernel: int(kernel.is_reduction())).group
    return (*group, *reduced)


def _runs_apart(shared: Sequence[Any], inner: Any) -> bool:
    sizes = (*shared, inner)
    if not all(isinstance(size, int | sympy.Integer) for size in sizes):
        return False
    return math.prod(map(int, shared)) * _MOST_INNER < int(inner)


def _is_local(kernel: Any, inside: set[str]) -> bool:
    outputs = kernel.get_outputs()
    if len(outputs) != 1 or not outputs[0].users:
        return False
    (buffer,) = outputs
    readers = [user.node for user in buffer.users]
    if not all(isinstance(r, SchedulerNode) and r.get_name() in inside for r in readers):
        return False
    name = buffer.get_name()
    in_order = _in_order(kernel._body)
    return (
        buffer.node.get_layout().is_contiguous()
        and kernel._body.get_write_expr(name) == in_order
        and all(reader._body.get_read_expr(name) == in_order for reader in readers)
    )


def _in_order(body: Any) -> Any:
    """The index of the element that a loop nest is at, if its loops go through memory in order."""
    index, stride = sympy.Integer(0), sympy.Integer(1)
    for variable, size in reversed(body.var_ranges.items()):
        index += stride * variable
        stride *= size
    return index


# ---- Triton kernels -----------------------------------------------------------------------------
_SPLITS_PER_MULTIPROCESSOR = 8
_SPLIT_ROWS = (16, 128)  # the fewest and the most rows of a partial sum


def is_triton_kernel(node: Any) -> bool:
    """Whether a scheduler's node becomes one Triton kernel, as far as mstpass knows them."""
    device = node.get_device()
    known = type(node) in (SchedulerNode, FusedSchedulerNode, FusedMixOrderReductions)
    return known and device is not None and device.type == "cuda"


def buffers_between_loops(node: Any) -> Set[str]:
    """The buffers that a kernel writes and itself reads again in a later loop.

    A kernel of several fused operations holds in registers what only it reads, with one exception:
    a reduction over long rows runs as loops over each row, and a value that one loop computes and a
    later one reads is written to memory in between. Inductor estimates such buffers itself before
    it writes a kernel.
    """
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
    """The elements of a kernel's workspace, which are float32; 0 if it has none.

    A *mix-order reduction* is one kernel that reduces over rows and over columns. Its sums over
    columns are partial sums of a number of rows each, in a workspace, and a second reduction adds
    them up.
    """
    if type(node) is not FusedMixOrderReductions:
        return 0
    rows, columns = map(hint_of, MixOrderReduction.get_numel_rnumel(node.node1))
    split_rows = config.triton.mix_order_reduction_split_size
    if split_rows is None:
        processors: Any = DeviceProperties.create(node.get_device()).multi_processor_count
        fewest, most = _SPLIT_ROWS
        split_rows = last_power_of_2(rows // (processors * _SPLITS_PER_MULTIPROCESSOR))
        split_rows = min(most, max(fewest, split_rows))
    count = sum(part.is_reduction() for part in node.node2.get_nodes())
    return int(count * columns * -(-rows // split_rows))


def hint_of(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size, fallback=1))
