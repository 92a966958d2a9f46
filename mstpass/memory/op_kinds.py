"""What Inductor makes of a node: its kind of ``Op``, and the loops that it runs in.

The loops are ``Op.own_loops`` and ``Op.loops_end``. Inductor fuses kernels that run through the
same loops. An op that reads its operand at other places than it writes, or whose loops cannot be
those of its operand's kernel, is not fused with that.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from mstpass.graph import ops
from mstpass.graph.heads import slice_rows
from mstpass.graph.joint import value_of
from mstpass.graph.loop_op import is_rows_on_host, is_wait_for_reload
from mstpass.graph.recompute_rules import is_input_write
from mstpass.graph.sizes import hint, is_size, outer_to_inner
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import argument
from mstpass.problem.op import (
    CONSTANT,
    INPUT,
    ITEM,
    POINTWISE,
    REALIZED,
    REDUCTION,
    SIZE,
    VIEW,
)

aten = torch.ops.aten

_UNROLLED = 8  # config.unroll_reductions_threshold


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
