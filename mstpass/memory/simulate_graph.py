"""A graph's nodes as the ops whose memory memory/simulate_ops.py simulates."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.joint import nbytes, tensors_of, value_of
from mstpass.graph.loop_op import SUM, mst_loop
from mstpass.graph.sizes import depends_on_data, hint_shape
from mstpass.graph.tokens import Refusal
from mstpass.memory.simulate_ops import held_outputs, simulate_ops
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.problem.op import CALL, CONSTANT, INPUT, ITEM, POINTWISE, REDUCTION, SCATTER, VIEW, Op

# StorageBox.should_realize_on_reuse
_DEAR_ON_CPU = frozenset({torch.ops.aten.exp.default, torch.ops.aten.sigmoid.default})
_CALLED = frozenset({"matmul", "sort", "write"})  # Inductor runs these rows by themselves
_WRITTEN_WHOLE = frozenset({torch.ops.aten.cat.default})  # ConcatKernel: each part into its place
# Kernels that compute what they write where they read it, as reductions do (ir.Scatter)
_SCATTERS = frozenset(
    {
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten._unsafe_masked_index_put_accumulate.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter_add.default,
    }
)
_FLASH_KEYS = 512  # FlashAttentionKernel.cpp: keys in a block; queries below
_FLASH_QUERIES = ((768, 256), (192, 64), (0, 32))


def simulate_step(
    forward: fx.Graph, backward: fx.Graph, scatters_delayed: bool = False
) -> StepMemory:
    """The memory of a step.

    Its inputs exist before it and do not count; what crosses to the backward is freed there after
    its last use, unless it was also returned to the caller.

    Args:
        scatters_delayed: scatters read their rows from memory
            (schedule/delay_embedding_gradient.py).
    """
    inputs = backward.find_nodes(op="placeholder")
    crossing = {n.name for n in inputs if not str(n.target).startswith("primals")}
    before, after = _ops(forward, scatters_delayed), _ops(backward, scatters_delayed)
    returned = Counter(n.name for n in _leaving(forward))
    outputs = [name for name, times in returned.items() if times > (name in crossing)]
    held, kept = held_outputs(before, outputs, crossing, after)
    freed = [*crossing, *(op.name for op in held)]
    values = (
        v for g in (forward, backward) for n in g.nodes for v in tensors_of(n.meta.get("val"))
    )
    return StepMemory(
        simulate_ops(before, returned),
        simulate_ops([*held, *after], [*(n.name for n in _leaving(backward)), *kept], freed),
        known=not any(map(depends_on_data, values)),
    )


def simulate_graph(graph: fx.Graph, freed_inputs: Iterable[fx.Node] = ()) -> Timeline:
    """The memory of one graph over its nodes; ``freed_inputs`` as in ``simulate_ops``."""
    kept = [n.name for n in _leaving(graph)]
    return simulate_ops(_ops(graph), kept, [n.name for n in freed_inputs])


def _ops(graph: fx.Graph, scatters_delayed: bool = False) -> list[Op]:
    return [
        op_of(n, scatters_delayed=scatters_delayed)
        for n in graph.nodes
        if n.op in ("placeholder", "call_function")
    ]


def _leaving(graph: fx.Graph) -> list[fx.Node]:
    """What a graph returns, as often as it does."""
    results: Any = graph.output_node().args[0]
    results = results if isinstance(results, tuple | list) else [results]
    return [result for result in results if isinstance(result, fx.Node)]


def op_of(node: fx.Node, summed: Set[fx.Node] = frozenset(), scatters_delayed: bool = False) -> Op:
    """One node as plain data.

    Args:
        summed: added to an accumulator by the product itself: they have no buffer.
    """
    kind = _kind(node)
    return Op(
        name=node.name,
        bytes=0 if node in summed else nbytes(node),
        inputs=tuple(n.name for n in node.all_input_nodes),
        kind=CALL if scatters_delayed and kind == SCATTER else kind,
        inner_bytes=_inner_bytes(node),
        dear=_is_dear(node),
    )


def _kind(node: fx.Node) -> str:
    if node.op == "placeholder":
        return INPUT
    kind = _kind_of(node.target)
    return CONSTANT if kind == POINTWISE and op_table.is_constant(node) else kind


@functools.cache
def _kind_of(target: Any) -> str:
    """Of what calls this; what is made from no tensor counts as pointwise."""
    if target in op_table.VIEWS:
        return ITEM if target is operator.getitem else VIEW
    if target in _SCATTERS:
        return SCATTER
    row = op_table.row_of(target)
    if isinstance(row, Refusal) or row.kind in _CALLED or target in _WRITTEN_WHOLE:
        return CALL
    return REDUCTION if row.kind == "reduce" else POINTWISE


def _is_dear(node: fx.Node) -> bool:
    value = value_of(node)
    return node.target in _DEAR_ON_CPU and value is not None and value.device.type == "cpu"


def _inner_bytes(node: fx.Node) -> int:
    """What a kernel needs besides its results: a loop the buffers of one chunk."""
    if "flash_attention_for_cpu" in op_table.name_of(node):
        return _flash_bytes(node)
    if node.target is not mst_loop:
        return 0
    root = node.graph.owning_module
    body, specs = node.args[0], node.args[4]
    assert root is not None and isinstance(body, fx.Node) and isinstance(specs, tuple | list)
    graph: fx.Graph = getattr(root, str(body.target)).graph
    parts: Any = graph.output_node().args[0]
    kinds: Any = [spec[0] for spec in specs]  # type: ignore[index]
    return body_bytes(graph, parts, kinds)


def body_bytes(graph: fx.Graph, parts: Sequence[fx.Node], kinds: Sequence[str]) -> int:
    """What one run of a loop's body needs, its results stacked or added to others."""
    summed = {
        part
        for part, kind in zip(parts, kinds, strict=True)
        if kind == SUM and op_table.is_matmul(part)
    }
    inner = [op_of(n, summed) for n in graph.nodes if n.op in ("placeholder", "call_function")]
    return simulate_ops(inner, [n.name for n in parts], fuse=True).peak.bytes


def _flash_bytes(node: fx.Node) -> int:
    backward = "backward" in op_table.name_of(node)
    operands = [value_of(n) for n in node.args if isinstance(n, fx.Node)]
    query, key = operands[backward : backward + 2]
    if query is None or key is None:
        return 0
    return flash_bytes(hint_shape(query), hint_shape(key), query.dtype, backward)


def flash_bytes(
    query_shape: Sequence[int], key_shape: Sequence[int], dtype: torch.dtype, backward: bool
) -> int:
    """Workspace of attention on the CPU, shapes (..., S, D).

    Each thread has a block of scores (backward: and its gradient) and a block of results.
    """
    rows, features = query_shape[-2:]
    rows = min(rows, next(block for least, block in _FLASH_QUERIES if rows >= least))
    keys = min(key_shape[-2], _FLASH_KEYS)
    elements = rows * (2 * keys if backward else keys + features + 2)
    size = torch.finfo(torch.float32).bits // 8
    if dtype.itemsize < size:  # and a copy of the scores in the inputs' type
        elements += rows * keys // 2 * (2 if backward else 1)
    return torch.get_num_threads() * elements * size
