"""Inductor's pass before fusion, in which its scheduler is mended for the graphs of mstpass.

Each of our graphs, each kernel and each backend gets methods of its own; those of others are as
Inductor made them. What is mended:

- Names. A loop writes into buffers that exist before it, and the scheduler knows its results under
  new names, by which their readers wait for it. When the CPU backend tries to fuse kernels of
  compatible shapes, ``SchedulerNode.recompute_size_and_body`` reads a kernel's operands from its
  body once more, and finds the old names there: 2.11 forgets the new names; 2.13 does so unless the
  kernel has been ordered by hand as well; 2.15 keeps them. The reader may then be fused into a
  kernel before the loop, and reads what is not written yet.
- Results in place. The last kernel that reads a result of a loop may write over it. Inductor looks
  for the memory under the result's new name, finds none and allocates it: the result stays where it
  is, and where the kernel's value needs no memory, that of a whole value is wasted. Here the kernel
  writes over the buffer that the loop wrote into.
- Hints. Inductor takes unknown sizes as 0 where it counts the bytes that two kernels share, and
  then fuses none of them. torch 2.11 does so for sizes with a hint as well, so that it fuses none
  of the kernels of a loop of symbolic length; later ones count the hint.
- Rows. Kernels with the same outer loop run as one, and what they hand to one another can stay in a
  local buffer that holds one row of the inner loop. Where the outer loop is vectorized too, 16 rows
  at once are written into that buffer, and the last one is left. So is the gradient of
  ``softmax(x).t()``. Such kernels have no outer loop in common here, as where their loops differ.
- Sums. Where several threads add to a value at indices (``index_put`` with ``accumulate``) and the
  kernel works in tiles of two dims, the position within a tile is added to the index twice. Sums go
  to wrong places, also behind the end of the value. torch 2.14 mends it as here. (In 2.11 and 2.12
  some of these kernels do not compile either, because the index is read before it is computed.)

The last two are in torch 2.11 to 2.13, under Inductor alone as well, and give wrong gradients on
the CPU. Source: torch/_inductor/scheduler.py, graph.py, sizevars.py, codegen/cpp.py
(``CppScheduling.codegen_outer_loop_node``, ``CppTile2DKernel.store``,
``CppTile2DOverrides.index_expr``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    CppTile2DKernel,
    CppVecKernel,
)
from torch._inductor.codegen.wrapper import can_match_buffer_size
from torch._inductor.dependencies import Dep, StarDep, WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.symbol import SymT, free_symbol_is_type

from mstpass.torch_internals.inductor import SchedulerPass

_COUNTS_HINTS = hasattr(SizeVarAllocator, "all_unbacked_explicitly_hinted")  # from torch 2.12 on
_ADDS_RIGHT = hasattr(CppKernel, "_use_parallel_atomic_add")  # from torch 2.14 on


class MendScheduler(SchedulerPass):
    """Mends the scheduler of each graph that it is called with."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        nodes = super().__call__(nodes)
        for node in nodes:
            for kernel in node.get_nodes():
                if isinstance(kernel, SchedulerNode):
                    keep_names(kernel)
                    write_over_results_of_loops(kernel)
                for result in kernel.get_outputs():
                    keep_if_unlike(result)
        count_hints(V.graph)
        if nodes:
            mend_vectorized_cpp(nodes[0].scheduler)
        return nodes


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


def write_over_results_of_loops(kernel: Any) -> None:
    """Let this kernel, if it writes over a result of a loop, write over the loop's buffer."""
    decide = kernel.decide_inplace_update

    def decide_by_buffers() -> None:
        decide()
        buffer_of, own = kernel.scheduler.mutation_real_name, V.kernel
        for value, result in list(getattr(own, "inplace_update_buffers", {}).items()):
            if result not in buffer_of:
                continue
            buffer = own.inplace_update_buffers[value] = buffer_of[result]
            places = own.args.inplace_buffers
            place = places[buffer] = places.pop(result)
            place.other_names[place.other_names.index(result)] = buffer
            if result in getattr(own, "mutations", ()):  # of Triton's kernels
                own.mutations.discard(result)
                own.mutations.add(buffer)

    kernel.decide_inplace_update = decide_by_buffers


def keep_if_unlike(result: Any) -> None:
    """Let no kernel write over a loop's result that is only a part of its buffer, or an input's."""
    if not isinstance(result.node, ir.MutationOutput):
        return
    scheduler = result.scheduler
    buffer = scheduler.name_to_buf.get(scheduler.mutation_real_name.get(result.get_name()))
    if isinstance(result.node.layout, ir.NoneLayout):  # what Inductor itself never overwrites
        return
    if buffer is None or not can_match_buffer_size(buffer.node, result.node):
        for user in result.users:
            user.can_inplace = False


def count_hints(graph: GraphLowering) -> None:
    """Have a graph count what its kernels read and write by the hints of sizes."""
    if _COUNTS_HINTS or "get_dep_size_hint" in vars(graph):
        return
    counted_by_torch, hints = graph.get_dep_size_hint, graph.sizevars.shape_env.var_to_hint_override

    def get_dep_size_hint(dep: Dep, count_bytes: bool = True) -> int:
        try:
            unknown = free_unbacked_symbols(dep.get_numel())
        except KeyError:  # it is of no value of the graph
            return counted_by_torch(dep, count_bytes)
        if not unknown or not unknown <= hints.keys():
            return counted_by_torch(dep, count_bytes)
        return dep.numbytes_hint() if count_bytes else dep.numel_hint()

    graph.get_dep_size_hint = get_dep_size_hint  # type: ignore[method-assign]


def mend_vectorized_cpp(scheduler: Any) -> None:
    """From now on, the scheduler's C++ backend, if it has one, mixes no rows and adds right."""
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
