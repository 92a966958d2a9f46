"""Write indexing with the tokens' own numbers as a gather or a scatter of one element per token.

    x[arange(N), index]                        =  x.gather(1, index[:, None])[:, 0]
    zeros.index_put([arange(N), index], v)     =  zeros.scatter_add(1, index[:, None], v[:, None])

The left sides name tokens by number, which a chunk cannot do; the right sides treat each token by
itself. An index may count from the end, as indexing allows. Each token writes to one place of its
own row, so nothing is written twice, and adding to zeros is writing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import generic_shape
from mstpass.graph.token_rules.arguments import argument

aten = torch.ops.aten

_READS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_WRITES = (aten.index_put.default, aten._unsafe_index_put.default)


def index_by_token(joint: JointGraph) -> Rewritten:
    """Rewrite such reads and writes of matrices, in a copy of the graph.

    Returns:
        The copy and the names of the gathers and scatters in it; the graph itself if it has none.
    """
    return rewritten(joint, filter(_indexes_by_token, joint.nodes), _rewrite)


def _rewrite(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    """Replace the node; returns the gather or the scatter."""
    with rewriting.graph.inserting_before(node):
        made, result = (_gather if node.target in _READS else _scatter)(rewriting.builder, node)
    for replacement in (made, result):
        replacement.meta.update(replacement_meta(node))
    rewriting.replace(node, result)
    return made


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
    value = value_of(node)
    if value is None or list(generic_shape(value)) != [count]:
        return False
    if node.target is torch.ops.prims.iota.default:
        return argument(node, "start") == 0 and argument(node, "step") == 1
    if node.target is aten.arange.start_step:
        return argument(node, "start") == 0 and argument(node, "step") == 1
    return False


def _column(builder: Builder, node: fx.Node) -> fx.Node:
    """The index of each row as ``[N, 1]``, counted from the start, as int64."""
    width = node.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
    index: Any = argument(node, "indices")[1]
    if index.meta["val"].dtype != torch.int64:
        cast = torch.ops.prims.convert_element_type.default
        index = builder.call(cast, index, torch.int64)
    from_end = builder.call(aten.lt.Scalar, index, 0)
    shifted = builder.call(aten.add.Tensor, index, width)
    index = builder.call(aten.where.self, from_end, shifted, index)
    return builder.call(aten.unsqueeze.default, index, 1)


def _gather(builder: Builder, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The gather, and its result as a vector."""
    gathered = builder.call(aten.gather.default, node.args[0], 1, _column(builder, node))
    return gathered, builder.call(aten.squeeze.dim, gathered, 1)


def _scatter(builder: Builder, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    values = builder.call(aten.unsqueeze.default, node.args[2], 1)
    column = _column(builder, node)
    made = builder.call(aten.scatter_add.default, node.args[0], 1, column, values)
    return made, made
