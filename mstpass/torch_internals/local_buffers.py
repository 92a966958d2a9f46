"""Which values stay inside of one C++ kernel that Inductor made of several loop nests.

On a CPU, Inductor puts loop nests with the same outer loops into one kernel, such as the maximum of
each row, the sum of each row, and what is divided by it. A value that one nest writes and another
reads is then a *local buffer* of a row, or a buffer in memory as if the nests were kernels of their
own. It is local where each nest has just one loop inside of the shared ones, and the value is
written and read in the order of its memory.

Source: torch/_inductor/codegen/cpp.py (``codegen_outer_loop_node``,
``OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.scheduler import SchedulerNode

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode.get_outer_nodes()",
        "torch._inductor.loop_body.LoopBody.get_read_expr(buffer_name)",
        "torch._inductor.loop_body.LoopBody.get_write_expr(buffer_name)",
        "torch._inductor.scheduler.SchedulerNode",
    ),
)
_MOST_INNER = 300  # iterations of the inner loop for one of the shared ones; above, nests run apart


def kernels_by_nest(node: Any) -> list[Sequence[Any]]:
    """The kernels that a node of the schedule is made of, those of one loop nest together."""
    if isinstance(node, OuterLoopFusedSchedulerNode):
        return [nest.get_nodes() for nest in node.get_outer_nodes()]
    return [node.get_nodes()]


def local_buffers(node: Any) -> set[str]:
    """Names of the values that are local buffers, which need next to no memory."""
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


def probe() -> None:
    APIS.require()
