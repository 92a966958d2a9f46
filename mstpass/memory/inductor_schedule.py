"""The memory of a step as Inductor has scheduled it: which kernels there are, fused and in order.

Plans are simulated on graphs (memory/simulate_ops.py), which do not say what Inductor will fuse.
This file reads its scheduler after fusion. A buffer is allocated by its kernel and freed after the
last one that reads it. C++ kernels that follow each other are one function, whose operands are
freed after it. A pointwise kernel may write over an operand that it is the last to read.

Private APIs, checked with torch 2.11, 2.13 and 2.15: config ``_post_fusion_custom_pass``, the
scheduler's nodes and buffers (torch/_inductor/scheduler.py: ``decide_inplace_update``,
``free_buffers``), ``reorder_for_peak_memory`` (torch/_inductor/memory.py), which runs behind the
hook and so runs in it as well, and the nodes that run a graph of their own (torch/_inductor/ir.py:
``WhileLoop``, ``InvokeSubgraph``, and ``Conditional``, which 2.15 calls ``Switch``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.codegen.wrapper import can_match_buffer_size
from torch._inductor.graph import SubgraphLowering
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.scheduler import NopKernelSchedulerNode, OutputNode
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._ordered_set import OrderedSet

from mstpass.memory.attention_workspace import flash_attention_bytes

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as _Pass
except ImportError:  # torch 2.11
    _Pass = object  # type: ignore[assignment, misc]

log = logging.getLogger(__name__)

# torch.cond: `Conditional` up to 2.14, `Switch` from 2.15 on
_BRANCH = ir.Switch if hasattr(ir, "Switch") else ir.Conditional
_NO_BUFFER = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)


@dataclasses.dataclass(frozen=True)
class _Moment:
    """While one kernel runs: bytes alive, and the loop body that runs in it."""

    bytes: int
    body: str = ""


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Of a graph, or of a loop's body, which lies behind its graph."""

    name: str
    is_body: bool
    moments: tuple[_Moment, ...]
    given: dict[str, int]  # bytes of inputs that are freed after their last use
    left_bytes: int  # when it is done


class ReadSchedule(_Pass):
    """Inductor's pass behind fusion; it keeps what it reads and changes nothing but the order.

    Attributes:
        failed: an error left a graph unread: nothing is known.
    """

    def __init__(self, users_pass: Callable[..., Any] | None = None):
        self.users_pass = users_pass
        self.failed = False
        self._schedules: list[_Schedule] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if self.users_pass is not None:
            nodes = self.users_pass(nodes)
        try:
            nodes = _in_final_order(nodes)
            self._schedules.append(_read(nodes))
        except Exception as error:  # private APIs: without them the simulated peak must do
            log.debug("Inductor's schedule could not be read: %s", error, exc_info=error)
            self.failed = True
        return nodes

    def uuid(self) -> Any:
        if self.users_pass is None:
            return "mstpass"  # the sources are part of the other hooks' keys
        uuid = getattr(self.users_pass, "uuid", None)
        theirs = uuid() if uuid is not None else None
        return None if theirs is None else f"mstpass-{theirs}"

    @property
    def peak_bytes(self) -> int | None:
        """Highest bytes of forward and backward; None where they were not both read."""
        graphs = [s for s in self._schedules if not s.is_body]
        if self.failed or len(graphs) != 2:
            return None
        try:
            backward, forward = (_peak(graph, bodies) for graph, bodies in self._with_bodies())
        except KeyError as body:
            log.debug("the schedule of %s has not been read", body)
            return None
        crossing = {name for name in graphs[1].given if not name.startswith("tangents")}
        saved_bytes = sum(graphs[1].given[name] for name in crossing)
        held_bytes = max(0, graphs[0].left_bytes - saved_bytes)  # by the caller of the forward
        return max(forward, backward + held_bytes)

    def _with_bodies(self) -> Iterator[tuple[_Schedule, dict[str, _Schedule]]]:
        bodies: dict[str, _Schedule] = {}
        for schedule in reversed(self._schedules):
            if schedule.is_body:
                bodies[schedule.name] = schedule
            else:
                yield schedule, bodies
                bodies = {}


def _peak(schedule: _Schedule, bodies: dict[str, _Schedule]) -> int:
    return max(
        (m.bytes + (_peak(bodies[m.body], bodies) if m.body else 0) for m in schedule.moments),
        default=0,
    )


def _in_final_order(nodes: list[Any]) -> list[Any]:
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


def _read(nodes: Sequence[Any]) -> _Schedule:
    is_body = isinstance(V.graph, SubgraphLowering)
    alive = {} if is_body else _freed_inputs()
    given = dict(alive)
    moments = tuple(_Reader(nodes, alive).moments()) if nodes else ()
    return _Schedule(str(V.graph.name), is_body, moments, given, sum(alive.values()))


def _freed_inputs() -> dict[str, int]:
    """Saved values and tangents: whatever is no input of the user's step."""
    return {
        name: _bytes_of(_buffer(value))
        for name, value in V.graph.graph_inputs.items()
        if isinstance(value, ir.TensorBox) and not name.startswith("primals")
    }


def _buffer(value: Any) -> Any:
    """Under a tensor's boxes and views."""
    while not isinstance(value, ir.Buffer):
        value = value.data
    return value


class _Reader:
    """Walks over one graph's kernels in order."""

    def __init__(self, nodes: Sequence[Any], alive: dict[str, int]):
        self.nodes, self.alive = nodes, alive
        self.scheduler = nodes[0].scheduler
        self.donated: dict[str, Any] = getattr(self.scheduler, "name_to_donated_buffer", {})
        self.last_uses = self._last_uses()
        self.done: set[str] = set()

    def moments(self) -> Iterator[_Moment]:
        pending: set[str] = set()
        running: list[Any] = []
        for node in self.nodes:
            if running and _is_alone(node):
                yield self._run(running, pending)
            pending |= self.last_uses[node]
            self._allocate(node)
            self.done |= {part.get_name() for part in node.get_nodes()}
            running.append(node)
            if _is_alone(node):
                yield self._run(running, pending)
        if running:
            yield self._run(running, pending)

    def _run(self, running: list[Any], pending: set[str]) -> _Moment:
        """One call; what nothing reads afterwards is freed behind it."""
        body = ""
        inner = 0
        for node in running:
            if isinstance(node.node, (_BRANCH, ir.InvokeSubgraph)):
                raise ValueError(f"{node.get_name()} runs a subgraph, whose memory is not counted")
            if isinstance(node.node, ir.WhileLoop):
                body = str(getattr(node.node.body_subgraph, "name", ""))
            inner = max(inner, _workspace_bytes(node.node))
        moment = _Moment(sum(self.alive.values()) + inner, body)
        for name in pending:
            buffer = self.scheduler.name_to_buf.get(name)
            if buffer is None or buffer.can_free():
                self.alive.pop(name, None)
        pending.clear()
        running.clear()
        return moment

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
        parts = node.get_nodes()
        inside = {part.get_name() for part in parts}
        for part in parts:
            for buffer in part.get_outputs():
                name = buffer.get_name()
                if name in self.scheduler.mutation_real_name or _is_fused_away(buffer, inside):
                    continue
                layout = buffer.node.layout
                if isinstance(layout, ir.NonOwningLayout):  # a part of a result of cat
                    whole = _buffer(layout.view)
                    self.alive.setdefault(whole.get_name(), _bytes_of(whole))
                elif isinstance(layout, ir.MultiOutputLayout):
                    items = [item for user in buffer.users for item in _items(user.node)]
                    self.alive |= {item.get_name(): _bytes_of(item) for item in items}
                elif not isinstance(layout, _NO_BUFFER) and not _is_alias(buffer.node):
                    written_over = self._written_over(part, buffer)
                    if written_over is not None:
                        del self.alive[written_over]
                    self.alive[name] = _bytes_of(buffer.node)

    def _written_over(self, part: Any, buffer: Any) -> str | None:
        if (_is_alone(part) and part.is_extern()) or isinstance(part, NopKernelSchedulerNode):
            return None
        behind = self.done | set(part.ancestors)
        for read in part.read_writes.reads:
            operand = self.scheduler.name_to_buf.get(read.name) or self.donated.get(read.name)
            if operand is None or read.name not in self.alive:
                continue
            users = [user for user in operand.users if user.node.get_name() not in behind]
            if (
                len(users) == 1
                and users[0].node is part
                and users[0].can_inplace
                and not isinstance(operand.defining_op, NopKernelSchedulerNode)
                and can_match_buffer_size(operand.node, buffer.node)
            ):
                return str(read.name)
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
    buffers = [buffer.node for buffer in node.get_outputs()]
    return [b for b in buffers if isinstance(b, ir.MultiOutput) and not _is_alias(b)]


def _is_alias(node: Any) -> bool:
    """Whether a call's result is an operand, written or not."""
    source: Any = node.inputs[0] if isinstance(node, ir.MultiOutput) else node
    return bool(source.get_mutation_names() or source.get_inputs_that_alias_output())


def _workspace_bytes(node: Any) -> int:
    name = str(getattr(node, "op_overload", ""))
    if "flash_attention_for_cpu" not in name:
        return 0
    backward = "backward" in name
    query, key = node.inputs[backward : backward + 2]
    return flash_attention_bytes(_shape(query), _shape(key), query.get_dtype(), backward)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(_hint(size) for size in node.get_size())


def _bytes_of(buffer: Any) -> int:
    if isinstance(buffer.layout, _NO_BUFFER):
        return 0
    dtype: torch.dtype = buffer.get_dtype()
    return _hint(V.graph.get_allocation_storage_size(buffer)) * dtype.itemsize


def _hint(size: Any) -> int:
    if free_unbacked_symbols(size):
        raise ValueError(f"{size} is known at run time only")
    return int(V.graph.sizevars.optimization_hint(size, fallback=1))
