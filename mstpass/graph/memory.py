"""The memory of a compiled graph, simulated: which buffers are alive while each kernel runs.

FX nodes are not buffers. What Inductor makes of them is modelled by four rules (sources:
torch/_inductor/lowering.py and ir.py for the first two, scheduler.py for the others):

- *Kernels* are calls (matmuls, attention, loops, whatever the op table does not know), reductions,
  and pointwise values that a call reads, that leave the graph, or that are read more than once and
  are dear. All other pointwise values are computed where they are read and have no buffer.
- A view is alive as what it is a view of.
- A buffer that only kernels of its own *stage* read, with no call between, is fused away.
- A pointwise kernel may write over an operand of its size that it is the last to read.

A buffer lives from its kernel to the last one that reads it. A loop has its results, and what one
chunk of its body needs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Set

import torch
from torch import fx

from mstpass.chunk.loop import SUM, mst_loop
from mstpass.graph import ops
from mstpass.graph.joint import nbytes, tensors_of, value_of
from mstpass.graph.sizes import depends_on_data
from mstpass.graph.tokens import Refusal

_DEAR_READS = 4  # config.realize_reads_threshold
_DEAR_OPS = 30  # config.realize_opcount_threshold
# StorageBox.should_realize_on_reuse
_DEAR_ON_CPU = frozenset({torch.ops.aten.exp.default, torch.ops.aten.sigmoid.default})
_WRITTEN_WHOLE = frozenset({torch.ops.aten.cat.default})  # ConcatKernel: each part into its place


@dataclasses.dataclass(frozen=True)
class Moment:
    """While a kernel runs: ``bytes`` alive, its own included."""

    node: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Of one graph. ``alive`` is what is there at the peak, by name, the largest first."""

    moments: tuple[Moment, ...]
    alive: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda m: m.bytes, default=Moment("", 0))


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Of a step's forward and backward, above what was allocated when the forward began."""

    forward: Timeline
    backward: Timeline
    known: bool = True  # False where a size depends on data, which counts as 1

    @property
    def peak_bytes(self) -> int:
        """Gradients included."""
        return max(self.forward.peak.bytes, self.backward.peak.bytes)

    def bytes_at(self, nodes: Set[str]) -> int:
        """The most that is alive while one of the named kernels runs; 0 where none is one."""
        moments = (*self.forward.moments, *self.backward.moments)
        return max((m.bytes for m in moments if m.node in nodes), default=0)


def simulate_step(forward: fx.Graph, backward: fx.Graph) -> StepMemory:
    """The memory of a step.

    Its inputs exist before it and do not count; what crosses to the backward is freed there after
    its last use.
    """
    inputs = backward.find_nodes(op="placeholder")
    crossing = [n for n in inputs if not str(n.target).startswith("primals")]
    values = (
        v for g in (forward, backward) for n in g.nodes for v in tensors_of(n.meta.get("val"))
    )
    known = not any(map(depends_on_data, values))
    return StepMemory(simulate(forward), simulate(backward, crossing), known)


def simulate(graph: fx.Graph, freed_inputs: Iterable[fx.Node] = ()) -> Timeline:
    """The memory of one graph over its nodes.

    Args:
        freed_inputs: placeholders that are alive from the beginning to their last use, such as
            saved values in a backward. Others, such as parameters, do not count.
    """
    return _Simulation(graph, set(freed_inputs)).run()


class _Simulation:
    def __init__(
        self, graph: fx.Graph, freed_inputs: set[fx.Node], summed: Set[fx.Node] = frozenset()
    ):
        self.nodes = list(graph.nodes)
        self.freed_inputs = freed_inputs
        self.summed = summed  # added to an accumulator by the product itself: no buffer
        self.kept = {_base(n) for n in graph.output_node().all_input_nodes}
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}  # buffers that a value is made from
        self.read_by_kernel: dict[fx.Node, frozenset[fx.Node]] = {}
        self.num_ops: Counter[fx.Node] = Counter()
        self.stage: Counter[fx.Node] = Counter()

    def run(self) -> Timeline:
        self._find_kernels()
        fused = self._fused_away()
        last_use: dict[fx.Node, fx.Node] = {}
        for kernel, read in self.read_by_kernel.items():
            last_use.update(dict.fromkeys(read, kernel))
        dies_at: dict[fx.Node, list[fx.Node]] = {}
        for buffer, kernel in last_use.items():
            if buffer not in self.kept:
                dies_at.setdefault(kernel, []).append(buffer)
        alive = {n: nbytes(n) for n in self.nodes if n in self.freed_inputs}
        moments: list[Moment] = []
        best: tuple[int, dict[fx.Node, int]] = (0, {})
        for kernel in self.read_by_kernel:
            dying = [b for b in dies_at.get(kernel, ()) if b in alive]
            born = 0 if kernel in fused or kernel in self.summed else nbytes(kernel)
            over = next((b for b in dying if alive[b] == born), None)
            if over is not None and not _is_call(kernel):
                dying.remove(over)
                del alive[over]
            if born:
                alive[kernel] = born
            now = sum(alive.values()) + _inner_bytes(kernel)
            moments.append(Moment(kernel.name, now))
            if now > best[0]:
                best = now, dict(alive)
            for buffer in dying:
                del alive[buffer]
            if kernel not in last_use and kernel not in self.kept:
                alive.pop(kernel, None)
        largest = sorted(best[1].items(), key=lambda pair: -pair[1])
        return Timeline(tuple(moments), tuple(Moment(n.name, size) for n, size in largest))

    # ---- kernels and buffers -------------------------------------------------------------------
    def _find_kernels(self) -> None:
        for node in self.nodes:
            if node.op == "placeholder":
                self.reads[node] = frozenset({node} & self.freed_inputs)
            elif node.op == "call_function":
                operands = [n for n in node.all_input_nodes if n in self.reads]
                reads = frozenset[fx.Node]().union(*(self.reads[n] for n in operands))
                self.num_ops[node] = 1 + sum(self.num_ops[n] for n in operands)
                self.stage[node] = max((self._stage_behind(n) for n in operands), default=0)
                if self._is_kernel(node, reads):
                    self.read_by_kernel[node] = reads
                    self.num_ops[node] = 0
                    reads = frozenset({node})
                self.reads[node] = reads

    def _stage_behind(self, node: fx.Node) -> int:
        return self.stage[node] + _is_call(_base(node))

    def _is_kernel(self, node: fx.Node, reads: frozenset[fx.Node]) -> bool:
        if ops.is_view(node):
            return False
        if _is_call(node) or ops.is_reduction(node):
            return True
        readers = ops.readers(node)
        if node in self.kept or any(map(_is_call, readers)):
            return not ops.is_constant(node) or node in self.kept
        if len(readers) < 2:
            return False
        value = value_of(node)
        on_cpu = value is not None and value.device.type == "cpu"
        dear = len(reads) > _DEAR_READS or self.num_ops[node] > _DEAR_OPS
        return dear or (on_cpu and node.target in _DEAR_ON_CPU)

    def _fused_away(self) -> set[fx.Node]:
        """Pointwise buffers that only kernels of their own stage read."""
        readers: dict[fx.Node, list[fx.Node]] = {}
        for kernel, read in self.read_by_kernel.items():
            for buffer in read:
                readers.setdefault(buffer, []).append(kernel)
        return {
            buffer
            for buffer in self.read_by_kernel
            if not _is_call(buffer) and buffer not in self.kept and readers.get(buffer)
            if all(not _is_call(k) and self.stage[k] == self.stage[buffer] for k in readers[buffer])
        }


def _base(node: fx.Node) -> fx.Node:
    """What a view shows; an item of a call's results is the call's."""
    while ops.is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_call(node: fx.Node) -> bool:
    """Whether Inductor runs the op by itself, on operands that lie in memory."""
    if node.op != "call_function" or ops.is_view(node):
        return False
    if ops.is_matmul(node) or node.target in _WRITTEN_WHOLE:
        return True
    row = ops.lookup(node)
    return isinstance(row, Refusal) or row.kind in ("sort", "write")


def _inner_bytes(node: fx.Node) -> int:
    """What a loop needs besides its results: the buffers of one chunk."""
    if node.target is not mst_loop:
        return 0
    root = node.graph.owning_module
    body, specs = node.args[0], node.args[4]
    assert root is not None and isinstance(body, fx.Node) and isinstance(specs, tuple | list)
    graph = getattr(root, str(body.target)).graph
    parts = graph.output_node().args[0]
    summed = {
        part
        for part, (kind, _, _) in zip(parts, specs, strict=True)
        if kind == SUM and ops.is_matmul(part)
    }
    return _Simulation(graph, set(), summed).run().peak.bytes
