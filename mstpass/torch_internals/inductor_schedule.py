"""Inductor's schedule: the order of its loops, and what each line of its code allocates and frees.

Inductor writes code as lines, objects with the buffers that they are about, in the order in which
they run. A buffer is allocated by a line of its own, or by the call whose result it is, and freed
by another one behind its last use; a kernel that writes over an operand takes its memory by a line.
What stays in registers, or in a local buffer of a C++ kernel, has no line. The workspaces of
generated kernels have lines as buffers do; those of the ops that are called have none.

The kernels are in their final order when Inductor begins to write, and the lines are complete when
the last of them is written. Source: torch/_inductor/graph.py (``GraphLowering.codegen``),
codegen/wrapper.py, scheduler.py (``free_buffers``, ``mutation_real_name``), ir.py (``WhileLoop``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import (
    AllocateLine,
    EnterSubgraphLine,
    ExternKernelAllocLine,
    ExternKernelOutLine,
    FreeIfNotReusedLine,
    FreeLine,
    MultiOutputLine,
    ReuseLine,
)
from torch._inductor.dependencies import WeakDep
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mstpass.torch_internals.graphs import Argument, OpCall, Operand, name_of, op_call, tree_leaves
from mstpass.torch_internals.versions import LostLoopError, NotCountedError, find

# torch.cond: `Conditional` up to 2.14, `Switch` from 2.15 on
_BRANCH = find("torch._inductor.ir.Switch | torch._inductor.ir.Conditional")
Allocated = Callable[[int, torch.device | None], int]
_NO_BUFFER = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)
_TOTAL = re.compile(r"(\w+) = \w+\[.*\]\.view\(.*\(dim=0\)")  # of a workspace of partial sums


@dataclasses.dataclass(frozen=True)
class Line:
    """What a line does, with the names of buffers.

    Inductor pickles a hook, with what it has read, into its cache keys: that must not depend on the
    order of a set, and its pickler takes no sets.

    Attributes:
        allocated: with their bytes.
        moved: a buffer that takes the memory of another one, and that one.
        freed: behind the line.
        loop_body: the name of the graph that it runs in a loop; empty where it runs none.
        op: what it calls, if its workspace is no buffer.
    """

    allocated: Mapping[str, int] = dataclasses.field(default_factory=dict)
    moved: tuple[str, str] | None = None
    freed: tuple[str, ...] = ()
    loop_body: str = ""
    op: OpCall | None = None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Of a graph, or of a loop's body, whose code is written before that of the graph it is in.

    Attributes:
        freed_inputs: bytes of the inputs that the graph frees: saved values and tangents, but not
            what the user's step is given.
        is_inference: no backward follows the graph.
    """

    name: str
    is_loop_body: bool
    freed_inputs: Mapping[str, int]
    lines: tuple[Line, ...]
    is_inference: bool = False


Write = Callable[[], None]


def around_code(nodes: Sequence[Any], run: Callable[[Sequence[Any], Write], None]) -> None:
    """Have a function write the code of the graph that Inductor schedules now.

    Args:
        nodes: the scheduler's kernels; of a graph without any, nothing is written.
        run: gets the kernels in their final order, and what writes the code.
    """
    if not nodes:
        run(nodes, lambda: None)
        return
    scheduler = nodes[0].scheduler
    write = scheduler.codegen
    scheduler.codegen = lambda: run(scheduler.nodes, write)


def read_schedule(
    wanted: Container[str] = (), allocated: Allocated = lambda size, _: size
) -> Schedule:
    """The schedule of the graph whose code is written.

    Args:
        wanted: names of the ops whose calls are told, as in ``OpCall``.
        allocated: what a buffer of a size takes on a device.

    Raises:
        NotCountedError: what it needs cannot be told.
    """
    is_body = isinstance(V.graph, SubgraphLowering)
    is_inference = not is_body and V.graph.is_inference
    inputs = {} if is_body or is_inference else _freed_inputs(allocated)
    lines = tuple(_Reader(wanted, allocated).lines())
    return Schedule(str(V.graph.name), is_body, inputs, lines, is_inference)


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


class _Reader:
    """Over the lines of one graph."""

    def __init__(self, wanted: Container[str], allocated: Allocated):
        self.wanted, self.bytes_allocated = wanted, allocated
        code: Any = V.graph.wrapper_code
        self.written = code.lines
        self.taken = {x.result_name for x in self.written if isinstance(x, MultiOutputLine)}

    def lines(self) -> Iterator[Line]:
        kernels = (part.node for node in V.graph.scheduler.nodes for part in node.get_nodes())
        for kernel in kernels:
            if isinstance(kernel, (_BRANCH, ir.InvokeSubgraph)):
                raise NotCountedError(f"{kernel.get_name()} runs a subgraph that is not counted")
        for line in self.written:
            if (found := self._line(line)) is not None:
                yield found

    def _line(self, line: Any) -> Line | None:
        if isinstance(line, EnterSubgraphLine):
            return Line(loop_body=str(line.graph.name))
        if isinstance(line, str):
            total = _TOTAL.match(line)
            return Line(self._bytes(V.graph.name_to_buffer[total[1]])) if total else None
        if isinstance(line, ExternKernelAllocLine | ExternKernelOutLine):
            return self._call(line.node, makes=isinstance(line, ExternKernelAllocLine))
        node = getattr(line, "node", None)
        if node is None or node.get_name() in V.graph.removed_buffers:
            return None
        if isinstance(line, AllocateLine):
            return Line(self._bytes(node))
        if isinstance(line, ReuseLine):
            return Line(moved=(line.reused_as.get_name(), node.get_name()))
        is_freed = isinstance(line, FreeLine | FreeIfNotReusedLine)
        return Line(freed=(node.get_name(),)) if is_freed else None

    def _call(self, node: Any, makes: bool) -> Line:
        """The call of an op, which may make its results itself."""
        results = tree_leaves(getattr(node, "outputs", ())) or [node]
        made = [r for r in results if isinstance(r, ir.Buffer) and makes and not _is_alias(r)]
        sizes = {name: size for r in made for name, size in self._bytes(r).items()}
        # Those that nobody takes live until the call has returned, and the tuple is gone.
        unread = tuple(name for name in sizes if name != node.get_name() and name not in self.taken)
        return Line(sizes, freed=unread, op=_op_of(node, self.wanted))

    def _bytes(self, buffer: Any) -> dict[str, int]:
        return {buffer.get_name(): _bytes_of(buffer, self.bytes_allocated)}


def _is_alias(node: Any) -> bool:
    """Whether a call's result is an operand, written or not."""
    source: Any = node.inputs[0] if isinstance(node, ir.MultiOutput) else node
    return bool(source.get_mutation_names() or source.get_inputs_that_alias_output())


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


def is_for_cpu() -> bool:
    """Whether all tensors of the graph that Inductor compiles now are on the CPU."""
    return all(kind == "cpu" for kind in V.graph.device_types)


# ---- loops -------------------------------------------------------------------------------------
_BARRIER = getattr(ir, "OrderingBarrier", ())  # of torch 2.15: hands a buffer on, reads nothing


def check_loops(nodes: Sequence[Any], condition: str) -> None:
    """Check that the schedule runs a graph's loops, each before what reads its results.

    A loop writes into buffers that exist before it (loops/lowering.py), and nothing but the loop
    may touch them until it has run, but for a loop before it in whose results it writes its own. A
    scheduler that loses the names of what a loop writes could move a reader in front of it
    (scheduler_mends.py); gradients would then be wrong, and nothing would say so.

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
