"""Which values of a loop's body are computed once, and which at each of their readers.

``eliminate_common_subexpressions`` sees through leading dims of size 1. A loss flattens its logits
for one term and not for another, so that a body has two softmaxes, one of ``[c, V]`` and one of
``[1, c, V]``. Ordinary CSE keeps both, as their shapes differ. Here two nodes are *equal* if they
are the same op on equal operands, leading dims of size 1 left out: these change neither how
operands broadcast nor, counted from the right, the dims of a reduction. Only the first of equal
nodes stays; where the others were read, it is reshaped.

``rematerialize_at_readers`` computes a chunk's wide pointwise values again at each reader. Inductor
writes a pointwise value that several kernels read to memory if it is slow to compute: an
exp, log or sigmoid on the CPU, or an expression of many reads or many ops
(``StorageBox.should_realize_on_reuse`` in torch/_inductor/ir.py). A softmax that its
entropy, its row sums and the gradient read is then one more buffer of chunk x vocabulary. Given a
copy of its own, each reader absorbs it, and the readers become one kernel that computes it once in
each pass over the row. Values that a matmul or attention reads or that leave the chunk need a
buffer in any case, so they are not copied.

The number of reads and ops is that of the whole expression, with what it reads of each row, such as
the logarithm of a sum. Those narrow values (``c`` elements) are materialized, so that each of them
counts as one read and no op.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_product
from mstpass.graph.builder import Builder
from mstpass.graph.joint import numel, value_of
from mstpass.graph.own_ops import materialize

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)
_VIEWS = (*_RESHAPES, aten.expand.default)
_WIDE = 0.25  # of the elements of the body's largest matmul result
_MOST_COPIES = 400  # a chain of values that are each read twice doubles with each of them


def eliminate_common_subexpressions(builder: Builder) -> None:
    """Keep the first of all equal nodes of the graph, in place."""
    first_of: dict[Hashable, fx.Node] = {}  # by key
    kept: dict[fx.Node, fx.Node] = {}  # for each node the one that stays
    for node in list(builder.graph.nodes):
        if _only_adds_or_drops_ones(node):
            kept[node] = kept[node.all_input_nodes[0]]
            continue
        key = _key(node, kept)
        kept[node] = node if key is None else first_of.setdefault(key, node)
        if kept[node] is not node:
            with builder.graph.inserting_before(node):
                reshaped = _with_rank_of(builder, kept[node], node)
            kept[reshaped] = kept[node]
            node.replace_all_uses_with(reshaped)
            builder.graph.erase_node(node)


def _only_adds_or_drops_ones(node: fx.Node) -> bool:
    """A view that differs from its operand only in leading dims of size 1."""
    if node.target not in _VIEWS:
        return False
    source = node.all_input_nodes[0]
    return _without_ones(node.meta["val"].shape) == _without_ones(source.meta["val"].shape)


def _key(node: fx.Node, kept: dict[fx.Node, fx.Node]) -> Hashable | None:
    """The same for equal nodes; None for a node that stays in any case."""
    value = value_of(node)
    if node.op != "call_function" or value is None:
        return None
    args: Any = node.args
    if node.target in _RESHAPES:
        return "reshape", kept[args[0]], _without_ones(value.shape)
    if node.target is aten.expand.default:
        # By the sizes in the arguments: a chunk's length may happen to equal the vocabulary's.
        return "expand", kept[args[0]], _without_ones(args[1])
    if ops.is_reduction(node) and len(args) > 1:
        rank = args[0].meta["val"].dim()
        dims = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        args = (args[0], tuple(dim % rank - rank for dim in dims), *args[2:])
    elif not (ops.is_pointwise(node) or ops.is_reduction(node) or ops.is_constant(node)):
        return None
    args, kwargs = fx.map_arg((args, node.kwargs), kept.__getitem__)
    return node.target, str(args), str(kwargs), value.dtype, _without_ones(value.shape)


def _without_ones(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The shape without leading dims of size 1; the last dim always stays."""
    first = next((i for i, size in enumerate(shape[:-1]) if size != 1), max(0, len(shape) - 1))
    return tuple(shape[first:])


def _with_rank_of(builder: Builder, node: fx.Node, other: fx.Node) -> fx.Node:
    """The node with as many leading dims of size 1 as the other node has."""
    rank = other.meta["val"].dim()
    while node.meta["val"].dim() > rank:
        node = builder.call(aten.squeeze.dim, node, 0)
    while node.meta["val"].dim() < rank:
        node = builder.call(aten.unsqueeze.default, node, 0)
    return node


def rematerialize_at_readers(graph: fx.Graph) -> None:
    """Give every reader of a wide pointwise value its own copy of that value, in place."""
    nodes = list(graph.nodes)
    wide = _WIDE * _largest_product(nodes)
    copies = 0
    for node in reversed(nodes):  # readers first: their copies need copies as well
        if numel(node) < wide or not _can_be_absorbed(node):
            continue
        for user in list(node.users)[1:]:
            if copies == _MOST_COPIES:
                return
            copies += 1
            with graph.inserting_after(node):
                user.replace_input_with(node, graph.node_copy(node))


def materialize_row_values(graph: fx.Graph) -> None:
    """Materialize the narrow pointwise values that wide ones read, in place."""
    nodes = list(graph.nodes)
    wide = _WIDE * _largest_product(nodes)
    for node in nodes:
        if node.op != "call_function" or not ops.is_pointwise(node) or ops.is_cheap_view(node):
            continue
        if 1 < numel(node) < wide and any(
            numel(reader) >= wide and ops.is_pointwise(reader)
            for reader in ops.readers_through_views(node)
        ):
            written = materialize(node)
            node.replace_all_uses_with(written, lambda user, own=written: user is not own)


def _largest_product(nodes: list[fx.Node]) -> int:
    return max((numel(node) for node in nodes if ops.is_matmul(node)), default=0)


def _can_be_absorbed(node: fx.Node) -> bool:
    """Whether the node is a pointwise value, or a view of one, that needs no buffer of its own."""
    while ops.is_cheap_view(node):
        node = node.all_input_nodes[0]
    return ops.is_pointwise(node) and not any(
        reader.op == "output" or is_product(reader) for reader in ops.readers_through_views(node)
    )
