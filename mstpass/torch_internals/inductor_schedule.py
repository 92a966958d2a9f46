"""Read Inductor's schedule after fusion: what each call allocates, overwrites and frees.

A *call* is what the generated code runs at once: an extern kernel, a template, a GPU kernel, or the
C++ kernels on the CPU that follow each other, which are one function. A buffer is allocated by its
kernel and freed after the last call that reads it. A pointwise kernel may write over an operand
that it is the last to read.

Source: torch/_inductor/scheduler.py (``decide_inplace_update``, ``free_buffers``), ir.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import can_match_buffer_size
from torch._inductor.graph import SubgraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode, OutputNode
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mstpass.torch_internals.graphs import Argument, OpCall, Operand, name_of, op_call, tree_leaves
from mstpass.torch_internals.inductor_kernels import (
    buffers_between_loops,
    is_triton_kernel,
    kernels_by_nest,
    local_buffers,
    partial_sums,
)
from mstpass.torch_internals.versions import find

# torch.cond: `Conditional` up to 2.14, `Switch` from 2.15 on
_BRANCH = find("torch._inductor.ir.Switch | torch._inductor.ir.Conditional")
Allocated = Callable[[int, torch.device | None], int]
_NO_BUFFER = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)


class NotCountedError(ValueError):
    """The graph has what this file does not count: other subgraphs, sizes that depend on data."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What the generated code runs at once, with the names of buffers.

    Inductor pickles a hook, with what it has read, into its cache keys: that must not depend on the
    order of a set, and its pickler takes no sets.

    Attributes:
        allocated: with their bytes, before the call runs.
        overwritten: operands whose memory a result of the call takes.
        freed: after the call.
        loop_body: the name of the graph that the call runs in a loop; empty where it runs none.
        ops: those of the call whose workspaces are no buffers of the schedule.
        workspace_bytes: what generated kernels need besides their buffers, and the results of a
            call that nobody reads.
    """

    allocated: Mapping[str, int]
    overwritten: tuple[str, ...]
    freed: tuple[str, ...]
    loop_body: str = ""
    ops: tuple[OpCall, ...] = ()
    workspace_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Of a graph, or of a loop's body, which Inductor schedules after the graph it is in.

    Attributes:
        freed_inputs: bytes of the inputs that the graph frees: saved values and tangents, but not
            what the user's step is given.
        is_inference: no backward follows the graph.
    """

    name: str
    is_loop_body: bool
    freed_inputs: Mapping[str, int]
    calls: tuple[Call, ...]
    is_inference: bool = False


def read_schedule(
    nodes: Sequence[Any], wanted: Container[str] = (), allocated: Allocated = lambda size, _: size
) -> Schedule:
    """The schedule of the graph that Inductor compiles now.

    Args:
        wanted: names of the ops whose calls are told, as in ``OpCall``.
        allocated: what a buffer of a size takes on a device.

    Raises:
        NotCountedError: what it needs cannot be told.
    """
    is_body = isinstance(V.graph, SubgraphLowering)
    is_inference = not is_body and V.graph.is_inference
    inputs = {} if is_body or is_inference else _freed_inputs(allocated)
    calls = tuple(_Walk(nodes, inputs, wanted, allocated).calls()) if nodes else ()
    return Schedule(str(V.graph.name), is_body, inputs, calls, is_inference)


def _freed_inputs(allocated: Allocated) -> dict[str, int]:
    return {
        name: _bytes_of(_buffer(value), allocated)
        for name, value in V.graph.graph_inputs.items()
        if isinstance(value, ir.TensorBox) and not name.startswith("primals")
    }


def _buffer(value: Any) -> Any:
    """Under a tensor's boxes and views."""
    while not isinstance(value, ir.Buffer):
        value = value.data
    return value


class _Walk:
    """Over one graph's kernels, in order."""

    def __init__(
        self,
        nodes: Sequence[Any],
        inputs: Mapping[str, int],
        wanted: Container[str],
        allocated: Allocated,
    ):
        self.nodes, self.wanted, self.bytes_allocated = nodes, wanted, allocated
        self.scheduler = nodes[0].scheduler
        self.donated: dict[str, Any] = getattr(self.scheduler, "name_to_donated_buffer", {})
        self.last_uses = self._last_uses()
        self.alive = set(inputs)
        self.done: set[str] = set()  # kernels
        self._begin_call()

    def _begin_call(self) -> None:
        self.kernels: list[Any] = []
        self.allocated: dict[str, int] = {}
        self.overwritten: list[str] = []
        self.unread: set[str] = set()  # afterwards
        self.partial_sums = 0
        self.dropped_bytes = 0  # of results that nobody reads
        self.place_of: dict[str, str] = {}  # the operands of values that have no buffer

    def calls(self) -> Iterator[Call]:
        for node in self.nodes:
            if self.kernels and _is_alone(node):
                yield self._end_call()
            self.unread |= self.last_uses[node]
            self._allocate(node)
            self.done |= {part.get_name() for part in node.get_nodes()}
            self.kernels.append(node)
            if _is_alone(node):
                yield self._end_call()
        if self.kernels:
            yield self._end_call()

    def _end_call(self) -> Call:
        freed = tuple(sorted(filter(self._can_free, self.unread & self.alive)))
        bodies = [body for kernel in self.kernels if (body := _loop_body(kernel))]
        ops = [op for kernel in self.kernels if (op := _op_of(kernel.node, self.wanted))]
        call = Call(
            self.allocated,
            tuple(self.overwritten),
            freed,
            bodies[-1] if bodies else "",
            tuple(ops),
            self.partial_sums * torch.float32.itemsize + self.dropped_bytes,
        )
        self.alive.difference_update(freed)
        self._begin_call()
        return call

    def _can_free(self, name: str) -> bool:
        buffer = self.scheduler.name_to_buf.get(name)
        return buffer is None or buffer.can_free()

    def _last_uses(self) -> dict[Any, set[str]]:
        """Buffers that no later kernel reads, by kernel."""
        real_name = self.scheduler.mutation_real_name
        later = set(V.graph.get_output_names())
        found: dict[Any, set[str]] = {}
        for node in reversed(self.nodes):
            used = {real_name.get(name, name) for name in node.used_or_aliased_buffer_names()}
            found[node] = used - later
            later |= used
        return found

    def _allocate(self, node: Any) -> None:
        kept: Set[str] = frozenset()
        if is_triton_kernel(node):
            kept = buffers_between_loops(node)
            self.partial_sums += partial_sums(node)
        local = local_buffers(node)
        for nest in kernels_by_nest(node):
            inside = {kernel.get_name() for kernel in nest}
            for kernel, buffer in ((k, buffer) for k in nest for buffer in k.get_outputs()):
                name = buffer.get_name()
                if name in self.scheduler.mutation_real_name or name in local:
                    continue
                if name not in kept and _is_fused_away(buffer, inside):
                    # What the kernel makes of it is written over what it would be written over.
                    if (operand := self._written_over(kernel, buffer)) is not None:
                        self.place_of[name] = operand
                else:
                    self._give_memory(kernel, buffer)

    def _give_memory(self, kernel: Any, buffer: Any) -> None:
        layout = buffer.node.layout
        if isinstance(layout, ir.NonOwningLayout):  # a part of a result of cat
            self._add(_buffer(layout.view))
        elif isinstance(layout, ir.MultiOutputLayout):
            read = [item for user in buffer.users for item in _items(user.node)]
            for item in read:
                self._add(item)
            # The others live until the call has returned, and the tuple is gone.
            returned = _multi_outputs(tree_leaves(getattr(buffer.node, "outputs", ())))
            others = (item for item in returned if not any(item is other for other in read))
            self.dropped_bytes += sum(_bytes_of(item, self.bytes_allocated) for item in others)
        elif not isinstance(layout, _NO_BUFFER) and not _is_alias(buffer.node):
            operand = self._written_over(kernel, buffer)
            if operand is not None:
                self.alive.remove(operand)
                self.overwritten.append(operand)
            self._add(buffer.node)

    def _add(self, buffer: Any) -> None:
        name = buffer.get_name()
        if name not in self.alive:
            self.allocated[name] = _bytes_of(buffer, self.bytes_allocated)
            self.alive.add(name)

    def _written_over(self, part: Any, buffer: Any) -> str | None:
        if (_is_alone(part) and part.is_extern()) or isinstance(part, NopKernelSchedulerNode):
            return None
        behind = self.done | set(part.ancestors)
        accesses = self.scheduler.get_fused_node(part).read_writes.reads_and_writes()
        for read in part.read_writes.reads:
            operand = self.scheduler.name_to_buf.get(read.name) or self.donated.get(read.name)
            name = self.scheduler.mutation_real_name.get(read.name, read.name)
            place = self.place_of.get(name, name)
            if operand is None or place not in self.alive:
                continue
            if isinstance(operand.node.layout, _NO_BUFFER):  # as of what a collective has written
                continue
            users = [user for user in operand.users if user.node.get_name() not in behind]
            if (
                len(users) == 1
                and users[0].node is part
                and users[0].can_inplace
                and not isinstance(operand.defining_op, NopKernelSchedulerNode)
                and can_match_buffer_size(operand.node, buffer.node)
                and len({dep for dep in accesses if dep.name == read.name}) < 2
            ):
                return str(place)
        return None


def _is_alone(node: Any) -> bool:
    """Whether what the kernel no longer needs is freed at once."""
    device = node.get_device()
    return node.is_extern() or node.is_template() or (device is not None and device.type != "cpu")


def _is_fused_away(buffer: Any, inside: set[str]) -> bool:
    """Whether only kernels that are one with its own read the buffer."""
    users = [user.node for user in buffer.users]
    if not users or isinstance(buffer.node, ir.MultiOutput):
        return False
    return all(not isinstance(u, OutputNode) and u.get_name() in inside for u in users)


def _items(node: Any) -> list[Any]:
    """The results of a call that a node takes out of it."""
    if isinstance(node, OutputNode):
        return []
    return _multi_outputs([buffer.node for buffer in node.get_outputs()])


def _multi_outputs(found: Sequence[Any]) -> list[Any]:
    return [b for b in found if isinstance(b, ir.MultiOutput) and not _is_alias(b)]


def _is_alias(node: Any) -> bool:
    """Whether a call's result is an operand, written or not."""
    source: Any = node.inputs[0] if isinstance(node, ir.MultiOutput) else node
    return bool(source.get_mutation_names() or source.get_inputs_that_alias_output())


def _loop_body(kernel: Any) -> str:
    if isinstance(kernel.node, (_BRANCH, ir.InvokeSubgraph)):
        raise NotCountedError(f"{kernel.get_name()} runs a subgraph, whose memory is not counted")
    if not isinstance(kernel.node, ir.WhileLoop):
        return ""
    return str(getattr(kernel.node.body_subgraph, "name", ""))


def _op_of(node: Any, wanted: Container[str]) -> OpCall | None:
    """The call of an extern kernel, if it is one of those that are asked for."""
    target = getattr(node, "op_overload", None)
    if target is None:  # a function of Inductor's own
        target = getattr(node, "python_kernel_name", None)
    if target is None or name_of(target) not in wanted:
        return None
    args: Sequence[Any] = node.inputs
    kwargs: Mapping[str, Any] = node.kwargs
    if isinstance(node, ir.FallbackKernel):
        args, kwargs = node.unflatten_args(node.inputs, node.constant_args)
        kwargs = {**kwargs, **node.kwargs}
    return op_call(target, args, kwargs, _argument_of)


def _argument_of(given: Any) -> Argument:
    if isinstance(given, ir.IRNode):
        shape, stride = (tuple(map(_hint, dims)) for dims in (given.get_size(), given.get_stride()))
        return Operand(shape, stride, given.get_dtype(), given.get_device_or_error())
    if isinstance(given, sympy.Expr):
        return _hint(given)
    return given if isinstance(given, int | float) else None


def _bytes_of(buffer: Any, allocated: Allocated) -> int:
    if isinstance(buffer.layout, _NO_BUFFER):
        return 0
    dtype: torch.dtype = buffer.get_dtype()
    size = _hint(V.graph.get_allocation_storage_size(buffer)) * dtype.itemsize
    return allocated(size, buffer.get_device())


def _hint(size: Any) -> int:
    shapes = V.graph.sizevars.shape_env
    if free_unbacked_symbols(size) - shapes.var_to_hint_override.keys():
        raise NotCountedError(f"{size} is known at run time only")
    return int(V.graph.sizevars.optimization_hint(size, fallback=1))
