"""Let Inductor write a chunk's gradient into the buffer of the chunk's logits.

Inductor reuses a buffer in place only if every other reader of it is an ancestor of the writer
(``SchedulerNode.decide_inplace_update`` in torch/_inductor/scheduler.py, torch 2.13). A *side
reader* is a narrow value that is read off the logits and that the gradient does not depend on, such
as the label's log-probability or an accuracy. It costs a second buffer of chunk x vocabulary. This
rewrite makes the gradient depend on it:

    gradient' = where(side == side, gradient, gradient)

which equals ``gradient``, whatever ``side`` holds.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors, numel, value_of
from mstpass.graph.token_rules.arguments import dims_of, has_argument
from mstpass.graph.tokens import Refusal

aten = torch.ops.aten


def write_gradients_in_place(builder: Builder, any_length: bool = False) -> None:
    """Make each gradient of a matmul's result depend on the side readers of that result.

    Args:
        any_length: the chunk's length is not fixed.
    """
    order = {node: i for i, node in enumerate(builder.graph.nodes)}
    for product in [node for node in order if ops.is_matmul(node)]:
        for gradient in _gradients(product, order):
            position, needed = order[gradient], ancestors([gradient])
            for side in _side_readers(product, order):
                if order[side] < position and side not in needed:
                    gradient = _depending_on(builder, gradient, side, any_length)


def _gradients(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Pointwise values computed from the product, of its size, that another matmul reads."""
    like = value_of(product)
    assert like is not None
    return [
        node
        for node in order
        if order[node] > order[product]
        and ops.is_pointwise(node)
        and (value := value_of(node)) is not None
        and value.numel() == like.numel()
        and value.element_size() == like.element_size()
        and any(map(ops.is_matmul, ops.readers_through_views(node)))
        and product in ancestors([node])
    ]


def _side_readers(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Narrow results of reductions and gathers over the product's rows."""
    found = []
    for node in order:
        row = ops.lookup(node) if node.op == "call_function" else None
        if row is None or isinstance(row, Refusal) or row.kind not in ("reduce", "index"):
            continue
        value = value_of(node)
        narrow = value is not None and numel(node) * 4 < numel(product)
        if narrow and any(numel(i) >= numel(product) for i in node.all_input_nodes):
            if _works_along_rows(node) and product in ancestors([node]):
                found.append(node)
    return found


def _works_along_rows(node: fx.Node) -> bool:
    """Whether an op gives something for each row; a sum over rows may have as many elements."""
    operand = value_of(node.all_input_nodes[0])
    if operand is None or not has_argument(node, "dim"):
        return True
    dims = dims_of(node, operand.dim(), "dim")
    return all(operand.shape[d] == 1 for d in dims if d != operand.dim() - 1)


def _depending_on(builder: Builder, gradient: fx.Node, side: fx.Node, any_length: bool) -> fx.Node:
    """The gradient, read through a ``where`` on the side value; as it is if shapes do not allow."""
    value, narrow = gradient.meta["val"], side.meta["val"]
    shape = _broadcast_shape(list(narrow.shape), list(value.shape))
    if shape is not None and any_length:
        shape = _of_any_length(shape)
    if shape is None:
        return gradient
    users = list(gradient.users)
    with builder.graph.inserting_before(gradient.next):  # users are in the order of creation
        rows = builder.call(aten.reshape.default, side, shape)
        same = builder.call(aten.eq.Tensor, rows, rows)
        dependent = builder.call(aten.where.self, same, gradient, gradient)
    for user in users:
        user.replace_input_with(gradient, dependent)
    return dependent


def _broadcast_shape(narrow: list[int], wide: list[int]) -> list[int] | None:
    """The shape in which a value of one element per row broadcasts to the wide shape."""
    return [*wide[:-1], 1] if math.prod(narrow) == math.prod(wide[:-1]) else None


def _of_any_length(shape: list[int]) -> list[int] | None:
    """The shape with the number of rows left open: ``[c, 1]`` -> ``[-1, 1]``."""
    if sum(size != 1 for size in shape) != 1:
        return None
    return [size if size == 1 else -1 for size in shape]
