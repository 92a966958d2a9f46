"""Merge what a body computes twice, once as ``[c, V]`` and once as ``[1, c, V]``.

A loss flattens its logits for one term and not for the next, so that each has a softmax of its own.
CSE cannot see that they are one, as their shapes differ. Here two nodes are *twins* if they are the
same op on twins: leading dims of size 1 change neither how operands broadcast nor, counted from
the right, the dims of a reduction.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.builder import Builder
from mstpass.graph.joint import value_of

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)
_VIEWS = (*_RESHAPES, aten.expand.default)


def eliminate_common_subexpressions(builder: Builder) -> None:
    """Leave the first of all twins, its shape changed where the others are read."""
    first: dict[Hashable, fx.Node] = {}
    twin: dict[fx.Node, fx.Node] = {}
    for node in list(builder.graph.nodes):
        if _is_same(node):
            twin[node] = twin[node.all_input_nodes[0]]
            continue
        key = _key(node, twin)
        twin[node] = node if key is None else first.setdefault(key, node)
        if twin[node] is not node:
            with builder.graph.inserting_before(node):
                shaped = _as_shaped(builder, twin[node], node)
            twin[shaped] = twin[node]
            node.replace_all_uses_with(shaped)
            builder.graph.erase_node(node)


def _is_same(node: fx.Node) -> bool:
    """A view that only adds or drops leading dims of size 1."""
    if node.target not in _VIEWS:
        return False
    source = node.all_input_nodes[0]
    return _core(node.meta["val"].shape) == _core(source.meta["val"].shape)


def _key(node: fx.Node, twin: dict[fx.Node, fx.Node]) -> Hashable | None:
    """Equal for twins; None for what has none."""
    value = value_of(node)
    if node.op != "call_function" or value is None:
        return None
    args: Any = node.args
    if node.target in _RESHAPES:
        return "reshape", twin[args[0]], _core(value.shape)
    if node.target is aten.expand.default:
        return "expand", twin[args[0]], _core(args[1])  # by its sizes: c is no V that is as long
    if op_table.is_reduction(node) and len(args) > 1:
        rank = args[0].meta["val"].dim()
        dims = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        args = (args[0], tuple(dim % rank - rank for dim in dims), *args[2:])
    elif not (
        op_table.is_pointwise(node) or op_table.is_reduction(node) or op_table.is_constant(node)
    ):
        return None
    args, kwargs = fx.map_arg((args, node.kwargs), twin.__getitem__)
    return node.target, str(args), str(kwargs), value.dtype, _core(value.shape)


def _core(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Without leading dims of size 1, but for the last dim."""
    first = next((i for i, size in enumerate(shape[:-1]) if size != 1), max(0, len(shape) - 1))
    return tuple(shape[first:])


def _as_shaped(builder: Builder, node: fx.Node, other: fx.Node) -> fx.Node:
    """The node with as many leading dims of size 1 as the other has."""
    rank = other.meta["val"].dim()
    while node.meta["val"].dim() > rank:
        node = builder.call(aten.squeeze.dim, node, 0)
    while node.meta["val"].dim() < rank:
        node = builder.call(aten.unsqueeze.default, node, 0)
    return node
