"""Items, indices and masks of tokens, written so that a loop can follow each token.

``items_as_slices``: those of a split or an ``unbind`` of wide values are slices and selections.

    split(x, n, dim)[i]  =  x.narrow(dim, i n, n)        unbind(x, dim)[i]  =  x.select(dim, i)

The rewrites of slices then need to know two ops only.

``index_by_token``: the tokens' own numbers as indices make a gather or a scatter per token.

    x[arange(N), index]                        =  x.gather(1, index[:, None])[:, 0]
    zeros.index_put([arange(N), index], v)     =  zeros.scatter_add(1, index[:, None], v[:, None])

The left sides name tokens by number, which a chunk cannot do; the right sides treat each token by
itself. An index may count from the end, as indexing allows. Each token writes to one place of its
own row, so nothing is written twice, and adding to zeros is writing.

``selections_as_rows``: a selection of rows is indexing with the numbers of the rows.

    x[mask]       =  x.reshape(N, ...)[rows]      rows = nonzero(mask.reshape(N))
    x[i, j]       =  x.reshape(N, ...)[rows]      rows = i * S + j, of a grid of [B, S] tokens
    zeros.index_put([mask], g)                    in the same way

A mask, or one tensor of indices for each token dim, says which tokens are chosen. One number for
each chosen token says the same, and move_token_slices.py can follow it. All selections by one mask
share its ``nonzero``, so that they have one size.

The selections of wide values are rewritten, and all others by the same masks and indices.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import (
    Size,
    expression,
    generic,
    generic_shape,
    is_size,
    is_static,
    same_shape,
)
from mstpass.graph.token_rules.arguments import argument, dims_of, shape_of
from mstpass.normalize.partial import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors
from mstpass.torch_internals.fake_tensors import bind_as, binds_size

aten = torch.ops.aten
_CATS = (aten.cat.default, aten.stack.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_READS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
_MASKS = (torch.bool, torch.uint8)
_Key = tuple[str, ...]  # the names of the indices, or that of the mask seen through views


def items_as_slices(joint: JointGraph) -> Rewritten:
    """Rewrite such items in a copy of the graph; the graph itself if it has none."""
    found = (node for node in joint.nodes if _is_item(node) and _is_wide(joint, node))
    return rewritten(joint, found, as_slice)


def _is_item(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    several = node.all_input_nodes[0]
    splits = several.target in _SPLITS or several.target is aten.unbind.int
    return splits and is_static(_source(node).meta["val"])


def _is_wide(joint: JointGraph, item: fx.Node) -> bool:
    """Whether the item holds tokens of the values after an anchor, or that an anchor multiplies,
    or is taken from a stack."""
    source, known = _source(item), joint.cached(downstream)
    (dim,) = dims_of(item.all_input_nodes[0], len(shape_of(source)), "dim")
    if (source in known and dim in known[source][0]) or item in joint.cached(_multiplied):
        return True
    while ops.is_cheap_view(source):
        source = source.all_input_nodes[0]
    return source.target in _CATS and any(n in known for n in source.all_input_nodes)


def _multiplied(joint: JointGraph) -> set[fx.Node]:
    """The values that an anchor multiplies, as they are before views and copies."""
    found = set()
    for anchor, _ in joint.cached(anchors):
        for node in ops.matmul_factors(anchor):
            while ops.is_cheap_view(node) or ops.is_copy(node):
                node = node.all_input_nodes[0]
            found.add(node)
    return found


def _source(item: fx.Node) -> fx.Node:
    return item.all_input_nodes[0].all_input_nodes[0]


def as_slice(rewriting: Rewriting, item: fx.Node) -> fx.Node:
    """The item as a slice or a selection."""
    builder = rewriting.builder
    several, index = item.args
    assert isinstance(several, fx.Node) and isinstance(index, int), "a node and a number"
    source = _source(item)
    (dim,) = dims_of(several, len(shape_of(source)), "dim")
    if several.target is aten.unbind.int:
        return builder.call(aten.select.int, source, dim, index)
    sizes = [value.shape[dim] for value in several.meta["val"]]
    ends = list(itertools.accumulate(sizes))
    return builder.call(aten.slice.Tensor, source, dim, ends[index] - sizes[index], ends[index])


def index_by_token(joint: JointGraph) -> Rewritten:
    """Rewrite such reads and writes of matrices, in a copy of the graph.

    Returns:
        The copy and the names of the gathers and scatters in it; the graph itself if it has none.
    """
    return rewritten(joint, filter(_indexes_by_token, joint.nodes), _by_token)


def _indexes_by_token(node: fx.Node) -> bool:
    if node.target not in (*_READS, *_WRITES):
        return False
    source, indices = value_of(node.args[0]), argument(node, "indices")  # type: ignore[arg-type]
    if source is None or source.dim() != 2 or len(indices) != 2:
        return False
    rows, columns = indices
    if not isinstance(rows, fx.Node) or not isinstance(columns, fx.Node):
        return False
    shape = generic_shape(source)
    if not _numbers(rows, shape[0]) or not isinstance(source.shape[1], int):
        return False
    column = value_of(columns)
    if column is None or column.dtype in (torch.bool, torch.uint8):
        return False
    if list(generic_shape(column)) != [shape[0]]:
        return False
    return node.target in _READS or _writes_one_per_row(node, shape[0])


def _writes_one_per_row(node: fx.Node, num_rows: int) -> bool:
    values = value_of(node.args[2])  # type: ignore[arg-type]
    if values is None or not linearity.is_zero(node.args[0]):
        return False
    return list(generic_shape(values)) == [num_rows] and values.is_floating_point()


def _numbers(node: fx.Node, count: int) -> bool:
    """Whether the value is 0, 1, ..., ``count - 1``."""
    if node.target not in (torch.ops.prims.iota.default, aten.arange.start_step):
        return False
    counts = argument(node, "start") == 0 and argument(node, "step") == 1
    return counts and list(generic_shape(node.meta["val"])) == [count]


def _column(builder: Builder, node: fx.Node) -> fx.Node:
    """The index of each row as ``[N, 1]``, counted from the start, as int64."""
    width = node.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
    index: Any = argument(node, "indices")[1]
    if index.meta["val"].dtype != torch.int64:
        cast = torch.ops.prims.convert_element_type.default
        index = builder.call(cast, index, torch.int64)
    return builder.call(aten.unsqueeze.default, _from_start(builder, index, width), 1)


def _from_start(builder: Builder, index: fx.Node, size: Any) -> fx.Node:
    """An index that may count from the end, counted from the start."""
    from_end = builder.call(aten.lt.Scalar, index, 0)
    shifted = builder.call(aten.add.Tensor, index, size)
    return builder.call(aten.where.self, from_end, shifted, index)


def _by_token(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    """The gather's result as a vector, or the scatter."""
    call, column = rewriting.builder.call, _column(rewriting.builder, node)
    if node.target in _READS:
        gathered = call(aten.gather.default, node.args[0], 1, column)
        return call(aten.squeeze.dim, gathered, 1)
    values = call(aten.unsqueeze.default, node.args[2], 1)
    return call(aten.scatter_add.default, node.args[0], 1, column, values)


def selections_as_rows(joint: JointGraph) -> Rewritten:
    """Rewrite such selections, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that index in it; the graph itself if none does.
    """
    wide = min((WIDE_OF_ANCHOR * numel(n) for n, _ in joint.cached(anchors)), default=None)
    if wide is None:
        return joint, frozenset()
    found = [node for node in joint.nodes if _selects(node)]
    chosen = {_key(n) for n in found if n.target in _READS and numel(n.all_input_nodes[0]) >= wide}
    first = {_key(node): node for node in reversed(found)}
    chosen = {key for key in chosen if not _is_mask(first[key]) or binds_size(first[key])}
    known: _Rows = {}
    write = lambda copy, node: _by_rows(copy, node, known)
    return rewritten(joint, (node for node in found if _key(node) in chosen), write)


# ---- reading ------------------------------------------------------------------------------------
def _selects(node: fx.Node) -> bool:
    """Whether a node reads or writes chosen rows of the leading dims, in another form than ours."""
    if node.target not in (*_READS, *_WRITES):
        return False
    source, given = value_of(node.all_input_nodes[0]), argument(node, "indices")
    found = (value_of(index) for index in given if isinstance(index, fx.Node))
    tensors = [tensor for tensor in found if tensor is not None]
    if source is None or not tensors or len(tensors) != len(given):
        return False
    is_mask = any(tensor.dtype in _MASKS for tensor in tensors)
    has_form = not is_mask and tensors[0].dim() == 1  # of our own, with one tensor
    if (len(tensors) > 1 and is_mask) or (len(tensors) == 1 and has_form):
        return False
    if _num_dims(node) > source.dim():
        return False
    return node.target in _READS or _writes_rows(node)


def _writes_rows(node: fx.Node) -> bool:
    """Whether each index has a row of values of its own."""
    base, values = node.all_input_nodes[0].meta["val"], value_of(node.args[2])  # type: ignore[arg-type]
    rest = base.shape[_num_dims(node) :]
    if values is None or values.dim() != len(rest) + len(_block(node)):
        return False
    if not same_shape(values.shape[len(_block(node)) :], rest):
        return False
    return _is_mask(node) or same_shape(values.shape, [*_block(node), *rest])


def _indices(node: fx.Node) -> list[fx.Node]:
    return list(argument(node, "indices"))


def _is_mask(node: fx.Node) -> bool:
    return _indices(node)[0].meta["val"].dtype in _MASKS


def _block(node: fx.Node) -> tuple[int, ...]:
    """The dims that stand for the indexed ones; of a mask they are one, of any size."""
    if _is_mask(node):
        return (1,)
    return tuple(torch.broadcast_shapes(*(generic_shape(i.meta["val"]) for i in _indices(node))))


def _num_dims(node: fx.Node) -> int:
    """How many leading dims of the source the indices choose from."""
    indices = _indices(node)
    return indices[0].meta["val"].dim() if _is_mask(node) else len(indices)


def _key(node: fx.Node) -> _Key:
    return tuple(_seen_through_views(i).name if _is_mask(node) else i.name for i in _indices(node))


def _seen_through_views(node: fx.Node) -> fx.Node:
    while ops.is_view_by_shape(node):
        node = node.all_input_nodes[0]
    return node


# ---- writing ------------------------------------------------------------------------------------
_Rows = dict[tuple[_Key, tuple[int, ...]], fx.Node]  # their numbers, by what selects them


def _by_rows(rewriting: Rewriting, node: fx.Node, known: _Rows) -> fx.Node:
    """What a node reads or writes, by the numbers of rows."""
    call, reshaped, rank = rewriting.builder.call, rewriting.sizes.reshaped, _num_dims(node)
    source = node.all_input_nodes[0]
    grid, rest = list(source.meta["val"].shape[:rank]), list(source.meta["val"].shape[rank:])
    key = _key(node), tuple(map(generic, grid))
    if key not in known:
        of_mask = _is_mask(node)
        known[key] = _of_mask(rewriting, node) if of_mask else _of_grid(rewriting, node, grid)
    rows, flat = known[key], reshaped(source, [math.prod(grid), *rest])
    if node.target in _READS:
        made = call(aten.index.Tensor, flat, [rows])
        if _is_mask(node):  # it has the shape, perhaps by another name of its size
            return made
    else:
        values = reshaped(node.args[2], [rows.meta["val"].shape[0], *rest])  # type: ignore[arg-type]
        accumulate = bool(argument(node, "accumulate")) and not _is_mask(node)
        made = call(aten.index_put.default, flat, [rows], values, accumulate)
    return reshaped(made, list(node.meta["val"].shape))


def _of_mask(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    """The numbers of the rows that a mask selects, ``[K]``."""
    (mask,) = _indices(node)
    size: Any = node.meta["val"].shape[0]
    flat = rewriting.sizes.reshaped(mask, [math.prod(mask.meta["val"].shape)])
    places = rewriting.graph.call_function(aten.nonzero.default, (flat,))
    bind_as(places, node, rewriting.builder.mode)
    rows = rewriting.builder.call(aten.squeeze.dim, places, 1)
    held = rewriting.builder.call(aten.sym_size.int, rows, 0)
    rewriting.sizes.learn(held)
    for other in list(rewriting.graph.nodes):  # they would read a wide value
        if other.target is aten.sym_size.int and other is not held and is_size(other):
            if expression(other.meta["val"]) == expression(size):
                rewriting.replace(other, held)
    return rows


def _of_grid(rewriting: Rewriting, node: fx.Node, grid: list[Size]) -> fx.Node:
    """The numbers of the rows that one index for each dim selects, ``[K]``."""
    builder, numbers, lengths = rewriting.builder, _indices(node), list[int | fx.Node]()
    if len(grid) > 1:
        lengths = rewriting.sizes.arguments(grid)
        pairs = zip(numbers, lengths, strict=True)
        numbers = [_from_start(builder, index, length) for index, length in pairs]
    rows = numbers[0]
    for number, length in zip(numbers[1:], lengths[1:], strict=True):
        rows = builder.call(aten.mul.Tensor, rows, length)
        rows = builder.call(aten.add.Tensor, rows, number)
    return rewriting.sizes.reshaped(rows, [math.prod(rows.meta["val"].shape)])
