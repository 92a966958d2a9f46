"""Mend two faults of Inductor's vectorized C++, for the graphs of one scheduler.

Both are in torch 2.11 to 2.13, under Inductor alone as well, and give wrong gradients on the CPU:

- Kernels with the same outer loop run as one, and what they hand to one another can stay in a local
  buffer that holds one row of the inner loop. Where the outer loop is vectorized too, 16 rows at
  once are written into that buffer, and the last one is left. So is the gradient of
  ``softmax(x).t()``. Such kernels have no outer loop in common here, as where their loops differ.
- Where several threads add to a value at indices (``index_put`` with ``accumulate``) and the kernel
  works in tiles of two dims, the position within a tile is added to the index twice. Sums go to
  wrong places, also behind the end of the value. torch 2.14 mends it as here. (In 2.11 and 2.12
  some of these kernels do not compile either, because the index is read before it is computed.)

Source: torch/_inductor/codegen/cpp.py (``CppScheduling.codegen_outer_loop_node``,
``CppTile2DKernel.store``, ``CppTile2DOverrides.index_expr``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    CppTile2DKernel,
    CppVecKernel,
)
from torch._inductor.virtualized import V
from torch.utils._sympy.symbol import SymT, free_symbol_is_type

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.config.cpp.dynamic_threads",
        "torch._inductor.codegen.cpp.CppKernel",
        "torch._inductor.codegen.cpp.CppKernelProxy.tile2d_kernel_cls",
        "torch._inductor.codegen.cpp.CppScheduling.codegen_outer_loop_node(node)",
        "torch._inductor.codegen.cpp.CppScheduling.kernel_proxy_cls",
        "torch._inductor.codegen.cpp.CppTile2DKernel.need_vec_transpose",
        "torch._inductor.codegen.cpp.CppTile2DKernel.store(name, index, value, mode)",
        "torch._inductor.codegen.cpp.CppVecKernel.store(name, index, value, mode)",
        "torch._inductor.codegen.cpp.LoopLevel(steps)",
        "torch._inductor.codegen.cpp.LoopNest(loops)",
        "torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr"
        "(cpp_kernel_proxy_list, outer_loop_fusion_depth)",
        "torch._inductor.scheduler.Scheduler.get_backend",
        "torch._inductor.virtualized.V",
        "torch.utils._sympy.symbol.SymT.TMP",
        "torch.utils._sympy.symbol.free_symbol_is_type",
    ),
)
_ADDS_RIGHT = hasattr(CppKernel, "_use_parallel_atomic_add")  # from torch 2.14 on


def mend_vectorized_cpp(scheduler: Any) -> None:
    """From now on, the C++ backend of this scheduler, if it has one, is without both faults."""
    if "cpu" not in V.graph.device_types:
        return
    backend: Any = scheduler.get_backend(torch.device("cpu"))
    if not isinstance(backend, CppScheduling):
        return
    generate = backend.codegen_outer_loop_node

    def generate_mended(node: Any) -> Any:
        _keep_rows_apart(node)
        return generate(node)

    backend.codegen_outer_loop_node = generate_mended  # type: ignore[method-assign]
    if not _ADDS_RIGHT and backend.kernel_proxy_cls is CppKernelProxy:
        backend.kernel_proxy_cls = _KernelProxy


def _keep_rows_apart(node: Any) -> None:
    """Let this kernel of several nodes have no buffer of one row for several rows."""
    loops_match = node.check_outer_fusion_loop_level_attr

    def match_row_by_row(kernels: Any, depth: int) -> bool:
        if not loops_match(kernels, depth):
            return False
        buffers = getattr(V.local_buffer_context, "local_buffers", None)
        outer = [level for kernel in kernels for level in kernel.loop_nest.loops[:depth]]
        return not buffers or all(level.steps == 1 for level in outer)

    node.check_outer_fusion_loop_level_attr = match_row_by_row


class _Tile2DKernel(CppTile2DKernel):
    def need_vec_transpose(self, index: Any) -> bool:
        # Up to 2.12, a tile that is transposed is written before its index is computed.
        computed = free_symbol_is_type(index, SymT.TMP)
        return not computed and bool(super().need_vec_transpose(index))

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        by_threads = config.cpp.dynamic_threads or self.num_threads != 1
        if mode == "atomic_add" and by_threads and not self.need_vec_transpose(index):
            CppVecKernel.store(self, name, index, value, mode)  # it adds the position in the tile
        else:
            super().store(name, index, value, mode)


class _KernelProxy(CppKernelProxy):
    tile2d_kernel_cls = _Tile2DKernel


def probe() -> None:
    APIS.require()
    APIS.expect(hasattr(type(V), "local_buffer_context"), "V has no local_buffer_context")
