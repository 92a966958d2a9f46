"""``gather`` of few elements per row, and its gradient, in forms that other kernels can absorb.

Such a gather reads the label's logit. Its scattered reads, fused with the gradient's kernel, keep
Inductor from writing the gradient into the logits' buffer: a second buffer of chunk x vocabulary.
The same element as a sum over the row is read in order,

    x[row, index[row]] = sum over v of where(v == index[row], x[row, v], 0)

and is equal, because all other terms are zero. A pointwise op whose other operands do not vary
along the row can be applied after the gather, ``gather(x - r) = gather(x) - r``, with the same
rounding. So the sum is taken over the matmul's result itself, in the kernel that also finds the
row's maximum.

The gradient, a ``scatter_add`` of one element per row into zeros, becomes

    where(v == index[row], gradient[row], 0)

and so does a ``scatter``, such as the gradient of a row's maximum, or one into other values than
zeros, such as logits of which the label's is masked.

Of a few elements per row, each is such a sum or such a choice: ``few_per_row``, ``gather_few`` and
``scatter_few``. That is more work than one scatter, and is done where a loop cuts the rows apart.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import same_shape

aten = torch.ops.aten
prims = torch.ops.prims
_SCATTERS = (aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
_FEW = 8  # each costs three pointwise ops on the whole row


def gathered_per_row(node: fx.Node) -> int:
    """How many floating-point elements the node gathers per row; 0 if it is no such gather."""
    if node.target is not aten.gather.default:
        return 0
    arguments: Any = node.args
    source, dim, index = arguments[:3]
    return _per_row(source, dim, index)


def _per_row(of: fx.Node, dim: int, index: fx.Node) -> int:
    indices = index.meta["val"]
    size = indices.shape[dim]
    fits = indices.dim() > 1 and of.meta["val"].is_floating_point()
    return size if fits and isinstance(size, int) else 0


def are_few(count: int) -> bool:
    """Whether so many elements per row may be worked on one by one."""
    return 0 < count <= _FEW


def gather_few(builder: Builder, source: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """``gather(source, dim, index)``, each element as ``gather_one``."""
    parts = [gather_one(builder, source, dim, one) for one in _each(builder, index, dim)]
    return parts[0] if len(parts) == 1 else builder.call(aten.cat.default, parts, dim)


def _each(builder: Builder, values: fx.Node, dim: int) -> list[fx.Node]:
    """The parts of size 1 along a dim."""
    count = values.meta["val"].shape[dim]
    if count == 1:
        return [values]
    return [builder.call(aten.slice.Tensor, values, dim, n, n + 1) for n in range(count)]


def gather_one(builder: Builder, source: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """``gather(source, dim, index)`` for an index of size 1 along ``dim``."""
    rank = source.meta["val"].dim()
    chain = [source]
    while (inner := _varying_operand(chain[-1], rank - dim % rank)) is not None:
        chain.append(inner)
    inner = chain.pop()
    gathered = _masked_sum(builder, inner, dim % rank, index)
    for node in reversed(chain):
        operands = {**{n: n for n in node.all_input_nodes}, inner: gathered}
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        inner, gathered = node, builder.call(node.target, *args, **kwargs)
    return gathered


def _varying_operand(node: fx.Node, from_right: int) -> fx.Node | None:
    """The operand of a pointwise op that varies along a dim, if there is exactly one."""
    if node.op != "call_function" or not ops.is_pointwise(node):
        return None
    varying = [
        operand
        for operand in node.all_input_nodes
        for value in tensors_of(operand.meta.get("val"))
        if value.dim() >= from_right and value.shape[-from_right] != 1
    ]
    if len(varying) != 1:
        return None
    if not same_shape(varying[0].meta["val"].shape, node.meta["val"].shape):
        return None
    return varying[0]


def scattered_per_row(node: fx.Node) -> int:
    """How many floating-point elements the node writes, or adds, per row; 0 if not to each row."""
    if node.target not in _SCATTERS:
        return 0
    arguments: Any = node.args
    _, dim, index, source = arguments[:4]
    rows = [*node.meta["val"].shape]
    rows[dim] = index.meta["val"].shape[dim]
    shapes = (n.meta["val"].shape for n in (index, source) if isinstance(n, fx.Node))
    is_of_all = all(same_shape(shape, rows) for shape in shapes)
    return _per_row(node, dim, index) if is_of_all else 0


def scatter_few(builder: Builder, node: fx.Node) -> fx.Node:
    """A scatter of one element per row, or of a few into zeros, each written by ``scatter_one``.

    Where a scatter that does not add is given an index twice, the last element counts.
    """
    arguments: Any = node.args
    found, dim, index, source = arguments[:4]
    adds = node.target is aten.scatter_add.default or _is_found_in_row(index)
    places = _each(builder, index, dim)
    is_node = isinstance(source, fx.Node)
    elements = _each(builder, source, dim) if is_node else [source] * len(places)
    for number, (one, element) in enumerate(zip(places, elements, strict=True)):
        base = arguments[0] if adds else found
        choice = scatter_one(builder, node, (base, dim, one, element))
        found = builder.call(aten.add.Tensor, found, choice) if adds and number else choice
    return found


def scatter_one(builder: Builder, node: fx.Node, args: Sequence[Any]) -> fx.Node:
    """A scatter of one element per row, written in order: one pass and no atomic adds.

    Args:
        node: the scatter in the graph.
        args: its arguments in the body.
    """
    base, dim, index, source = args[:4]
    value, call = base.meta["val"], builder.call
    if node.target is not aten.scatter_add.default and not _is_found_in_row(index):
        _assert_in_bounds(builder, index, value.shape[dim])
    hit = _index_mask(builder, value, dim % value.dim(), index)
    if linearity.is_zero(base):
        base = builder.filled([], 0, value)
    elif node.target is aten.scatter_add.default:
        source = call(aten.add.Tensor, base, source)
    if not isinstance(source, fx.Node):
        source = builder.filled([], source, value)
    return call(aten.where.self, hit, source, base)


def _is_found_in_row(index: fx.Node) -> bool:
    """Whether an index is the place of a maximum, so that it is not out of bounds."""
    index = ops.base_of(index)
    if index.target is operator.getitem:
        index = index.all_input_nodes[0]
    return ops.row(index).kind in ("reduce", "sort")


def _masked_sum(builder: Builder, source: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    value, call = source.meta["val"], builder.call
    _assert_in_bounds(builder, index, value.shape[dim])
    hit = _index_mask(builder, value, dim, index)
    chosen = call(aten.where.self, hit, source, builder.filled([], 0, value))
    return call(aten.sum.dim_IntList, chosen, [dim], True)


def _assert_in_bounds(builder: Builder, index: fx.Node, size: int) -> None:
    """Make an index out of bounds an error, as the gather does."""
    call = builder.call
    outside = call(
        aten.bitwise_or.Tensor, call(aten.lt.Scalar, index, 0), call(aten.ge.Scalar, index, size)
    )
    # Inductor knows no ``all`` in a graph that AOTAutograd has decomposed
    within = call(aten.logical_not.default, call(aten.any.default, outside))
    message = f"mst: an index (a label, say) is out of bounds: 0 <= index < {size}"
    call(aten._assert_async.msg, within, message)


def _index_mask(builder: Builder, value: torch.Tensor, dim: int, index: fx.Node) -> fx.Node:
    """A bool tensor of the value's shape, true where ``index`` points: ``iota == index``."""
    shape = [1] * value.dim()
    shape[dim] = value.shape[dim]
    places = builder.call(
        prims.iota.default,
        value.shape[dim],
        start=0,
        step=1,
        dtype=torch.int32,  # so that vectors of indices are as wide as vectors of float32
        device=value.device,
        requires_grad=False,
    )
    narrow = builder.call(prims.convert_element_type.default, index, torch.int32)
    return builder.call(aten.eq.Tensor, builder.call(aten.reshape.default, places, shape), narrow)
