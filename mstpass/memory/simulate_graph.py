"""Simulate the memory of FX graphs: their nodes as the plain ops of memory/simulate_ops.py."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from mstpass.graph import ops
from mstpass.graph.buffer_ops import parts_in_place
from mstpass.graph.collectives import is_wait_op
from mstpass.graph.host_copies import is_on_host, is_wait_for_reload
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.materialization import REALIZE
from mstpass.graph.scatter_rows import rows_of
from mstpass.graph.sizes import depends_on_data, hint, is_size
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.views import VIEWS
from mstpass.graph.tokens import Refusal
from mstpass.memory.allocation import buffer_bytes
from mstpass.memory.kernels import Kernels
from mstpass.memory.simulate_ops import GraphOps, held_outputs, simulate_ops
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.memory.workspaces import node_workspace_bytes
from mstpass.problem.op import (
    CALL,
    CONSTANT,
    INPUT,
    ITEM,
    POINTWISE,
    REALIZED,
    REDUCTION,
    SCATTER,
    SIZE,
    VIEW,
    Op,
)

aten = torch.ops.aten

# Pointwise ops that Inductor does not compute again for every reader
# (StorageBox.should_realize_on_reuse in torch/_inductor/ir.py; up to torch 2.12 only exp and
# sigmoid).
_SLOW_ON_CPU = frozenset(
    {
        aten.exp.default,
        aten.log.default,
        aten.log10.default,
        aten.log1p.default,
        aten.log2.default,
        aten.sigmoid.default,
        aten.tanh.default,
    }
)
# Kinds of ops that run as calls; so do cat, which writes each part into its place (ConcatKernel in
# torch/_inductor/ir.py), and cumsum, whose Scan has a loop nest of its own.
_CALLED_KINDS = frozenset({"matmul", "sort", "write", "collective"})
_CALLED = frozenset({aten.cat.default, aten.cumsum.default})
# Views of a part of their operand; and ops of the kind "index" that read where they write.
_PARTS = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
    }
)
_IN_PLACE = frozenset(
    {aten.tril.default, aten.triu.default, aten._softmax.default, aten._log_softmax.default}
)
# Kernels that compute the values they write, as reductions do (Scatter in torch/_inductor/ir.py).
_SCATTERS = frozenset(
    {
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten._unsafe_masked_index_put_accumulate.default,
        aten.scatter.src,
        aten.scatter_add.default,
    }
)


def simulate_step(
    forward: fx.Graph, backward: fx.Graph, scatters_delayed: bool = False
) -> StepMemory:
    """The memory of a step.

    The inputs of the step exist before it and do not count. A value that crosses to the backward is
    freed there after its last use, unless the forward also returned it to the caller.

    Args:
        scatters_delayed: scatters wait for their rows where that frees memory
            (delayed_scatters.py).
    """
    ops = step_ops(forward, backward, scatters_delayed)
    return StepMemory(ops.forward.simulated(), ops.backward.simulated(), ops.known)


@dataclasses.dataclass(frozen=True)
class StepOps:
    """The ops of the two graphs of a step; ``known`` as in ``StepMemory``."""

    forward: GraphOps
    backward: GraphOps
    known: bool


def step_ops(forward: fx.Graph, backward: fx.Graph, scatters_delayed: bool = False) -> StepOps:
    """The ops of a step; arguments as of ``simulate_step``."""
    inputs = backward.find_nodes(op="placeholder")
    crossing = {n.name for n in inputs if not str(n.target).startswith("primals")}
    forward_ops, backward_ops = _ops(forward, scatters_delayed), _ops(backward, scatters_delayed)
    returned = Counter(n.name for n in _results(forward))
    # The forward also returns each crossing value once, for the backward.
    outputs = [name for name, times in returned.items() if times > (name in crossing)]
    held, kept = held_outputs(forward_ops, outputs, crossing, backward_ops)
    gradients = [n.name for n in _results(backward)]
    values = (
        value
        for graph in (forward, backward)
        for node in graph.nodes
        for value in tensors_of(node.meta.get("val"))
    )
    freed = (*crossing, *(op.name for op in held))
    return StepOps(
        GraphOps(tuple(forward_ops), tuple(returned)),
        GraphOps((*held, *backward_ops), (*gradients, *kept), freed),
        known=not any(map(depends_on_data, values)),
    )


def scatters_to_delay(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The scatters of a finished graph that wait for their rows, each with these."""
    scatters = {node: rows for node in graph.nodes if (rows := rows_of(node)) is not None}
    if not scatters:
        return {}
    crossing = {
        n.name
        for n in graph.find_nodes(op="placeholder")
        if not str(n.target).startswith("primals") and not is_size(n)
    }
    waiting = Kernels(_ops(graph, scatters_delayed=True), (), crossing).waiting
    return {node: rows for node, rows in scatters.items() if node.name in waiting}


def simulate_graph(graph: fx.Graph, freed_inputs: Iterable[fx.Node] = ()) -> Timeline:
    """The memory of one graph; ``freed_inputs`` are freed after their last use."""
    kept = [n.name for n in _results(graph)]
    return simulate_ops(_ops(graph), kept, [n.name for n in freed_inputs])


def _ops(graph: fx.Graph, scatters_delayed: bool = False) -> list[Op]:
    return [
        op_of(n, scatters_delayed=scatters_delayed)
        for n in graph.nodes
        if n.op in ("placeholder", "call_function")
    ]


def _results(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph returns; one that it returns twice is listed twice."""
    results: Any = graph.output_node().args[0]
    results = results if isinstance(results, tuple | list) else [results]
    return [result for result in results if isinstance(result, fx.Node)]


def op_of(
    node: fx.Node, in_place: Set[fx.Node] = frozenset(), scatters_delayed: bool = False
) -> Op:
    """One node as plain data.

    Args:
        in_place: nodes whose result goes straight into a loop's buffer, so that they have no
            buffer of their own.
        scatters_delayed: as in ``simulate_step``.
    """
    kind = _kind(node)
    return Op(
        name=node.name,
        bytes=0 if node in in_place or is_on_host(node) else buffer_bytes(node),
        inputs=tuple(n.name for n in node.all_input_nodes),
        kind=kind,
        inner_bytes=_inner_bytes(node),
        dear=_is_slow_pointwise(node),
        own_loops=_has_own_loops(node),
        on_cpu=_is_on_cpu(node),
        may_wait=scatters_delayed and kind == SCATTER and rows_of(node) is not None,
    )


def _kind(node: fx.Node) -> str:
    if is_size(node):
        return SIZE
    if node.op == "placeholder":
        return INPUT
    if is_wait_for_reload(node):
        return VIEW
    kind = _kind_of(node.target)
    return CONSTANT if kind == POINTWISE and ops.is_constant(node) else kind


@functools.cache
def _kind_of(target: Any) -> str:
    """The kind of op that a call of the target is. Ops that create tensors count as pointwise."""
    if target in VIEWS:
        return ITEM if target is operator.getitem else VIEW
    if is_wait_op(target):  # it returns the memory of the pending result
        return VIEW
    if target in _SCATTERS:
        return SCATTER
    if target is REALIZE:
        return REALIZED
    row = ops.row_of(target)
    if isinstance(row, Refusal) or row.kind in _CALLED_KINDS or target in _CALLED:
        return CALL
    return REDUCTION if row.kind == "reduce" else POINTWISE


def _has_own_loops(node: fx.Node) -> bool:
    """``Op.own_loops``. A copy in another order of dims reads at other places than it writes."""
    operand = value_of(node.all_input_nodes[0]) if node.all_input_nodes else None
    value = value_of(node)
    if operand is None or value is None or node.op != "call_function":
        return False
    if _kind_of(node.target) == REDUCTION:
        return _reduces_outer_dims(operand, reduced_dims(node, operand.dim()))
    if node.target is aten.clone.default:
        return _outer_to_inner(operand) != _outer_to_inner(value)
    return _reads_elsewhere(node.target)


def _outer_to_inner(value: Tensor) -> list[int]:
    """The dims of more than one element, in the order in which they lie in memory."""
    long = [d for d in range(value.dim()) if hint(value.shape[d]) > 1]
    return sorted(long, key=lambda d: -hint(value.stride()[d]))


@functools.cache
def _reads_elsewhere(target: Any) -> bool:
    row = ops.row_of(target)
    is_index = not isinstance(row, Refusal) and row.kind == "index"
    return target in _PARTS or (is_index and target not in _IN_PLACE)


def _reduces_outer_dims(operand: Tensor, dims: Sequence[int]) -> bool:
    """Whether a reduction runs over a dim that lies outside, in memory, of one that it keeps."""
    sizes, strides = operand.shape, operand.stride()
    long = [d for d in range(operand.dim()) if hint(sizes[d]) > 1]
    reduced = [hint(strides[d]) for d in long if d in dims]
    kept = [hint(strides[d]) for d in long if d not in dims and hint(strides[d])]
    return bool(reduced and kept) and max(reduced) > min(kept)


def _is_slow_pointwise(node: fx.Node) -> bool:
    return node.target in _SLOW_ON_CPU and _is_on_cpu(node)


def _is_on_cpu(node: fx.Node) -> bool:
    return any(tensor.device.type == "cpu" for tensor in tensors_of(node.meta.get("val")))


def _inner_bytes(node: fx.Node) -> int:
    """The workspace of a call: for a loop, the peak of one chunk."""
    if node.target is not mst_loop:
        return node_workspace_bytes(node)
    root = node.graph.owning_module
    body = node.args[0]
    assert root is not None and isinstance(body, fx.Node)
    graph: fx.Graph = getattr(root, str(body.target)).graph
    parts: Any = graph.output_node().args[0]
    return body_bytes(graph, parts)


def body_bytes(graph: fx.Graph, parts: Sequence[fx.Node]) -> int:
    """The peak of one run of a loop's body.

    Args:
        parts: the nodes that it returns.
    """
    in_place = {node for part in parts for node in parts_in_place(part)}
    timeline_ops = [
        op_of(n, in_place) for n in graph.nodes if n.op in ("placeholder", "call_function")
    ]
    return simulate_ops(timeline_ops, [n.name for n in parts], fuse=True).peak.bytes
