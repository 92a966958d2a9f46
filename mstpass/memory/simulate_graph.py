"""Simulate the memory of FX graphs: their nodes as the plain ops of memory/simulate_ops.py.

What Inductor makes of a node is its kind of ``Op``, and the loops that it runs in: ``Op.own_loops``
and ``Op.loops_end``. Inductor fuses kernels that run through the same loops. An op that reads its
operand at other places than it writes, or whose loops cannot be those of its operand's kernel, is
not fused with that.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from mstpass.graph import linearity, ops
from mstpass.graph.buffer_ops import parts_in_place
from mstpass.graph.heads import slice_rows
from mstpass.graph.joint import nbytes, tensors_of, value_of
from mstpass.graph.loop_op import (
    is_on_host,
    is_rows_on_host,
    is_wait_for_reload,
    mst_loop,
    operands_in_rows,
    rows_on_host,
    written_over,
)
from mstpass.graph.recompute_rules import is_input_write
from mstpass.graph.sizes import (
    depends_on_data,
    hint,
    hint_numel,
    is_size,
    is_static,
    outer_to_inner,
)
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import argument
from mstpass.memory.allocation import buffer_bytes
from mstpass.memory.kernels import Kernels
from mstpass.memory.simulate_ops import GraphOps, StepMemory, backward_of, simulate_ops
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

_UNROLLED = 8  # config.unroll_reductions_threshold


def simulate_step(
    forward: fx.Graph, backward: fx.Graph, scatters_delayed: bool = False
) -> StepMemory:
    """The memory of a step.

    The inputs of the step exist before it and do not count. A value that crosses to the backward is
    freed there after its last use, unless the forward also returned it to the caller.

    Args:
        scatters_delayed: scatters wait for their rows where that frees memory
            (kernel_rules.py).
    """
    forward_ops, backward_ops, known = step_ops(forward, backward, scatters_delayed)
    return StepMemory(forward_ops.simulated(), backward_ops.simulated(), known)


def step_ops(
    forward: fx.Graph, backward: fx.Graph, scatters_delayed: bool = False
) -> tuple[GraphOps, GraphOps, bool]:
    """The ops of both graphs of a step, and ``StepMemory.known``; arguments as above."""
    inputs = backward.find_nodes(op="placeholder")
    crossing = {n.name for n in inputs if not str(n.target).startswith("primals")}
    forward_ops, backward_ops = _ops(forward, scatters_delayed), _ops(backward, scatters_delayed)
    returned = Counter(n.name for n in _results(forward))
    # The forward also returns each crossing value once, for the backward.
    outputs = [name for name, times in returned.items() if times > (name in crossing)]
    gradients = [n.name for n in _results(backward)]
    beside = backward_of(forward_ops, outputs, crossing, backward_ops, gradients, crossing)
    values = (
        value
        for graph in (forward, backward)
        for node in graph.nodes
        for value in tensors_of(node.meta.get("val"))
    )
    known = not any(map(depends_on_data, values))
    return GraphOps(tuple(forward_ops), tuple(returned)), beside, known


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


def _ops(graph: fx.Graph, scatters_delayed: bool = False) -> list[Op]:
    return [
        op_of(n, scatters_delayed=scatters_delayed)
        for n in graph.nodes
        if n.op in ("placeholder", "call_function")
    ]


def rows_of(node: fx.Node) -> fx.Node | None:
    """The rows that a scatter adds into zeros, as the gradient of an embedding, if it may wait for
    them.

    It may if both have a static shape, and the rows are smaller than the result.
    """
    position = ops.row(node).added_rows  # of the last tensor that it reads
    if position is None or not linearity.is_zero(node.args[0]) or not is_static(node.meta["val"]):
        return None
    rows = node.args[position]
    if not isinstance(rows, fx.Node) or rows.op != "call_function":
        return None
    return rows if nbytes(rows) < nbytes(node) else None


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
    over = written_over(node)
    kind = kind_of(node) if over is None else VIEW  # of the operand
    on_cpu = _is_on_cpu(node)
    in_no_buffer = node in in_place or is_input_write(node) or over is not None
    return Op(
        name=node.name,
        bytes=0 if in_no_buffer or is_on_host(node) else buffer_bytes(node),
        inputs=tuple(n.name for n in (*([over] if over else []), *_read(node))),
        kind=kind,
        inner_bytes=_inner_bytes(node),
        slow=on_cpu and ops.row(node).slow_on_cpu,
        own_loops=has_own_loops(node),
        shift=shift(node),
        transposed=transposed(node),
        loops_end=loops_end(node) if on_cpu else (),
        outer_sizes=outer_sizes(node) if on_cpu else (),
        on_cpu=on_cpu,
        may_wait=scatters_delayed and kind == SCATTER and rows_of(node) is not None,
        concatenates=concatenates(node),
        writes_anywhere=ops.row(node).writes_anywhere,
        numel=sum(map(hint_numel, tensors_of(node.meta.get("val")))),
        in_rows=operands_in_rows(node),
    )


def _read(node: fx.Node) -> Sequence[fx.Node]:
    """What a node reads: a wait for a copy reads the copy alone, not what it was copied from."""
    inputs = node.all_input_nodes
    return inputs[:1] if is_wait_for_reload(node) else inputs


def _is_on_cpu(node: fx.Node) -> bool:
    return any(tensor.device.type == "cpu" for tensor in tensors_of(node.meta.get("val")))


def _inner_bytes(node: fx.Node) -> int:
    """The workspace of a call: for a loop, the peak of one chunk, with its rows from the host."""
    if node.target is not mst_loop:
        return node_workspace_bytes(node) or _unread_bytes(node)
    root = node.graph.owning_module
    body = node.args[0]
    assert root is not None and isinstance(body, fx.Node), "the root is known, the body is a node"
    graph: fx.Graph = getattr(root, str(body.target)).graph
    parts: Any = graph.output_node().args[0]
    from_host = {operand.name for operand in node.args[5] if rows_on_host(operand)}  # type: ignore[union-attr, arg-type]
    rows_bytes = sum(size for name, size in operands_in_rows(node) if name in from_host)
    return body_bytes(graph, parts) + rows_bytes


def _unread_bytes(node: fx.Node) -> int:
    """Bytes of those results of a call that nobody reads, where others are read: a sort's indices
    exist while it runs."""
    items = [user for user in node.users if kind_of(user) == ITEM]
    if not items or kind_of(node) != CALL:
        return 0
    return max(0, buffer_bytes(node) - sum(map(buffer_bytes, items)))


def body_bytes(graph: fx.Graph, parts: Sequence[fx.Node]) -> int:
    """The peak of one run of a loop's body.

    Args:
        parts: the nodes that it returns.
    """
    in_place = {node for part in parts for node in parts_in_place(part)}
    run = (node for node in graph.nodes if node.op in ("placeholder", "call_function"))
    kept = [n.name for n in parts]
    return simulate_ops([op_of(n, in_place) for n in run], kept, fuse=True).peak.bytes


# ---- what Inductor makes of a node ---------------------------------------------------------------
def kind_of(node: fx.Node) -> str:
    """The kind of a node: one of the constants of problem/op.py."""
    if is_size(node):
        return SIZE
    if node.op == "placeholder":
        return INPUT
    if is_wait_for_reload(node) or is_rows_on_host(node):
        return VIEW
    if is_input_write(node):
        return REALIZED
    kind = ops.row(node).memory_kind
    if kind == ITEM and ops.shares_storage(node):  # a part of what was split
        return VIEW
    if kind == REDUCTION and num_unrolled(node) > 0:
        return POINTWISE
    return CONSTANT if kind == POINTWISE and ops.is_constant(node) else kind


def num_unrolled(node: fx.Node) -> int:
    """How many elements a reduction adds up that runs as a pointwise op; 0 for all other nodes.

    Source: ``Reduction.create`` in torch/_inductor/ir.py.
    """
    if ops.row(node).memory_kind != REDUCTION:
        return 0
    operand, value = value_of(node.all_input_nodes[0]), value_of(node)
    if operand is None or value is None:
        return 0
    sizes = [operand.shape[d] for d in reduced_dims(node, operand.dim())]
    if not all(isinstance(size, int) for size in sizes):
        return 0
    number = math.prod(sizes)
    whole = value.device.type == "cpu" and hint(value.numel()) == 1
    return number if number < _UNROLLED and not whole else 0


def concatenates(node: fx.Node) -> bool:
    """``Op.concatenates``. On a GPU a concatenation of a few values is a pointwise op.

    Source: ``cat`` in torch/_inductor/lowering.py.
    """
    value = value_of(node)
    return (
        node.target is aten.cat.default
        and value is not None
        and value.device.type == "cpu"
        and value.dtype not in (torch.int8, torch.uint8)
        and len(node.all_input_nodes) > 1
    )


def has_own_loops(node: fx.Node) -> bool:
    """``Op.own_loops``. A copy in another order of dims reads at other places than it writes."""
    operand = value_of(node.all_input_nodes[0]) if node.all_input_nodes else None
    value = value_of(node)
    if operand is None or value is None or node.op != "call_function":
        return False
    row = ops.row(node)
    if row.memory_kind == REDUCTION:
        dims = reduced_dims(node, operand.dim())
        return num_unrolled(node) > 1 or _reduces_outer_dims(operand, dims)
    return row.reads_elsewhere or transposed(node) is not None


def shift(node: fx.Node) -> tuple[int, int] | None:
    """``Op.shift``."""
    written = node.target is aten.slice_scatter.default  # into zeros: from where the slice read
    if not (written or node.target is aten.slice.Tensor) or argument(node, "step") != 1:
        return None
    rank, start = len(_hint_shape(node)), slice_rows(node).start
    return rank - argument(node, "dim") % rank, -start if written else start


def transposed(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """``Op.transposed``."""
    if node.target is not aten.clone.default:
        return None
    source, value = node.all_input_nodes[0], value_of(node)
    while source.target is aten.clone.default:
        source = source.all_input_nodes[0]
    read, users = value_of(source), node.users
    if read is None or value is None or all(user.target is aten.clone.default for user in users):
        return None  # what another copy reads is computed there, and lies nowhere
    before, after = (
        [dim for dim in outer_to_inner(tensor) if hint(tensor.shape[dim]) > 1]
        for tensor in (read, value)
    )
    if before == after:
        return None
    runs = [[after[0]]]  # dims that are neighbours in both orders are one
    for outer, dim in itertools.pairwise(after):
        if before.index(dim) != before.index(outer) + 1:
            runs.append([])
        runs[-1].append(dim)
    order = sorted(runs, key=lambda run: before.index(run[0]))
    shape = _hint_shape(node)
    sizes = tuple(math.prod(shape[dim] for dim in run) for run in order)
    return sizes, tuple(map(order.index, runs))


def outer_sizes(node: fx.Node) -> tuple[int, ...]:
    """``Op.outer_sizes``."""
    is_reduction = node.op == "call_function" and kind_of(node) == REDUCTION
    shape = _hint_shape(node.all_input_nodes[0] if is_reduction else node)
    return tuple(itertools.accumulate(shape[:-1], operator.mul))


def loops_end(node: fx.Node) -> tuple[int, ...]:
    """``Op.loops_end``."""
    shape = _hint_shape(node)
    long = [dim for dim, size in enumerate(shape[::-1], start=1) if size > 1]
    repeated = _repeated_dims(node)
    pairs = itertools.pairwise(long)
    ends = [d for d, outer in pairs if any((d in x) != (outer in x) for x in repeated)]
    if node.op == "call_function" and _is_part(node):
        for part in map(_hint_shape, node.all_input_nodes):
            if len(part) == len(shape):
                sizes = enumerate(zip(part[::-1], shape[::-1], strict=True), start=1)
                ends += [dim for dim, (n, m) in sizes if n != m]
    outside = {math.prod(shape[:-dim]) for dim in ends}
    return tuple(sorted(outside - {1}))


def _repeated_dims(node: fx.Node) -> list[set[int]]:
    """The dims, counted from the last, in which a fused op repeats each of its smaller operands."""
    if node.op != "call_function" or kind_of(node) not in (POINTWISE, VIEW):
        return []
    whole, found = _hint_shape(node)[::-1], []
    for operand in node.all_input_nodes:
        part = _hint_shape(operand)[::-1]
        if value_of(operand) is not None and math.prod(part) < math.prod(whole):
            sizes = enumerate(itertools.zip_longest(part, whole, fillvalue=1), start=1)
            found.append({dim for dim, (n, m) in sizes if n == 1 < m})
    return found


def _is_part(node: fx.Node) -> bool:
    """Whether the node shows a part of its operand, or writes it as a part of zeros."""
    return (ops.is_view(node) and ops.row(node).reads_elsewhere) or ops.is_padded(node)


def _hint_shape(node: fx.Node) -> tuple[int, ...]:
    value = value_of(node)
    return () if value is None else tuple(map(hint, value.shape))


def _reduces_outer_dims(operand: Tensor, dims: Sequence[int]) -> bool:
    """Whether a reduction runs over a dim that lies outside, in memory, of one that it keeps."""
    sizes, strides = operand.shape, operand.stride()
    long = [d for d in range(operand.dim()) if hint(sizes[d]) > 1]
    reduced = [hint(strides[d]) for d in long if d in dims]
    kept = [hint(strides[d]) for d in long if d not in dims and hint(strides[d])]
    return bool(reduced and kept) and max(reduced) > min(kept)
