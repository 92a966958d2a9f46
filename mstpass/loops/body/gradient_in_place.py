"""Let Inductor write a chunk's gradient over its logits.

Inductor reuses a buffer in place only when every other reader of it is an ancestor of the writer
(``SchedulerNode.decide_inplace_update`` in torch/_inductor/scheduler.py, torch 2.13). A value that
is read off the logits on the side, such as the label's log-probability or an accuracy, is no
ancestor of the gradient, and costs a second buffer of chunk x vocabulary. This pass makes it one:

    gradient' = where(side == side, gradient, gradient)

which is ``gradient``, whatever ``side`` holds.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors, numel, value_of
from mstpass.graph.tokens import Refusal

aten = torch.ops.aten


def write_gradients_in_place(builder: Builder, any_rows: bool = False) -> None:
    """Tie late side readers of a body's wide products to the wide values written after them.

    Args:
        any_rows: the body must fit chunks of any length.
    """
    graph = builder.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    products = [n for n in order if op_table.is_matmul(n)]
    for product in products:
        for written in _written_like(product, order):
            position, needed = order[written], ancestors([written])
            for side in _side_readers(product, order):
                if order[side] < position and side not in needed:
                    written = _tie(builder, written, side, any_rows)


def _written_like(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Pointwise values of the product's shape that come from it and that a matmul reads."""
    like = value_of(product)
    assert like is not None
    return [
        n
        for n in order
        if order[n] > order[product]
        and op_table.is_pointwise(n)
        and (value := value_of(n)) is not None
        and value.numel() == like.numel()
        and value.element_size() == like.element_size()
        and any(map(op_table.is_matmul, op_table.readers(n)))
        and product in ancestors([n])
    ]


def _side_readers(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Row-wise results read off the product that are narrow."""
    found = []
    for node in order:
        row = op_table.lookup(node) if node.op == "call_function" else None
        if row is None or isinstance(row, Refusal) or row.kind not in ("reduce", "index"):
            continue
        value = value_of(node)
        narrow = value is not None and numel(node) * 4 < numel(product)
        if narrow and any(numel(i) >= numel(product) for i in node.all_input_nodes):
            if product in ancestors([node]):
                found.append(node)
    return found


def _tie(builder: Builder, written: fx.Node, side: fx.Node, any_rows: bool) -> fx.Node:
    value, narrow = written.meta["val"], side.meta["val"]
    shape = _broadcast_shape(list(narrow.shape), list(value.shape))
    if shape is not None and any_rows:
        shape = _of_any_length(shape)
    if shape is None:
        return written
    users = list(written.users)
    with builder.graph.inserting_before(users[0]):
        rows = builder.call(aten.reshape.default, side, shape)
        same = builder.call(aten.eq.Tensor, rows, rows)
        tied = builder.call(aten.where.self, same, written, written)
    for user in users:
        user.replace_input_with(written, tied)
    return tied


def _broadcast_shape(narrow: list[int], wide: list[int]) -> list[int] | None:
    """A shape of the narrow value, one element a row, that broadcasts to the wide one's."""
    return [*wide[:-1], 1] if math.prod(narrow) == math.prod(wide[:-1]) else None


def _of_any_length(shape: list[int]) -> list[int] | None:
    """The same sizes with the rows left open: ``[c, 1]`` -> ``[-1, 1]``."""
    if sum(size != 1 for size in shape) != 1:
        return None
    return [size if size == 1 else -1 for size in shape]
