"""Let Inductor write a chunk's gradient into the buffer of the chunk's logits.

Inductor reuses a buffer in place only if every other reader of it is an ancestor of the writer
(``SchedulerNode.decide_inplace_update`` in torch/_inductor/scheduler.py). A *side
reader* is a narrow value that is read off the logits and that the gradient does not depend on, such
as the label's log-probability or an accuracy. It costs a second buffer of chunk x vocabulary. This
rewrite makes the gradient depend on it:

    gradient' = where(side == side, gradient, gradient)

which equals ``gradient``, whatever ``side`` holds.

A gradient that is made of narrow values, such as that of a row's maximum, and the zeros into which
a scatter writes do not read the logits at all. Their buffer is a second one beside the logits'. On
a CPU, what lies between two products is one function. On a GPU, one kernel runs over the rows of
the logits, first to reduce them and then to write the gradient. So they read the logits as well::

    gradient' = where(logits == logits, gradient, gradient)

On a GPU this is left out where other values of the logits' size lie between, such as the indices of
a sort: the logits are freed before the gradient is allocated.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors, numel, value_of
from mstpass.graph.token_rules.arguments import dims_of, has_argument
from mstpass.walk import walk, walk_once

aten = torch.ops.aten


def write_gradients_in_place(builder: Builder, any_length: bool = False) -> None:
    """Make each gradient of a matmul's result depend on the side readers of that result.

    Args:
        any_length: the chunk's length is not fixed.
    """
    _read_products(builder, any_length)
    order = {node: i for i, node in enumerate(builder.graph.nodes)}
    for product in [node for node in order if ops.is_matmul(node)]:
        for gradient in _gradients(product, order):
            position, needed = order[gradient], ancestors([gradient])
            for side in _side_readers(product, order):
                if order[side] < position and side not in needed:
                    gradient = _depending_on(builder, gradient, side, any_length)


def _gradients(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Pointwise values computed from the product, of its size, that another matmul reads."""
    return [
        node
        for node in order
        if order[node] > order[product]
        and ops.is_pointwise(node)
        and _fits(node, product)
        and _matmul_reads(node)
        and product in ancestors([node])
    ]


def _fits(node: fx.Node, product: fx.Node) -> bool:
    """Whether the node's buffer has the size of the product's."""
    value, like = value_of(node), value_of(product)
    if value is None or like is None:
        return False
    return value.numel() == like.numel() and value.element_size() == like.element_size()


def _matmul_reads(node: fx.Node) -> bool:
    """Whether a matmul reads the node, or what a scatter makes of it in its buffer."""
    scattered = lambda n: [r for r in ops.readers_through_views(n) if _is_scatter_into(r, n)]
    made = walk([node], scattered)
    return any(ops.is_matmul(reader) for n in made for reader in ops.readers_through_views(n))


def _is_scatter_into(reader: fx.Node, base: fx.Node) -> bool:
    return ops.is_scatter(reader) and ops.base_of(reader.args[0]) is ops.base_of(base)  # type: ignore[arg-type]


# ---- gradients that do not read the product ------------------------------------------------------
def _read_products(builder: Builder, any_length: bool) -> None:
    """Make gradients that are computed from narrow values of a product read the product itself."""
    nodes = list(builder.graph.nodes)
    unused = [node for node in nodes if ops.is_matmul(node)]
    for node in nodes:
        is_scatter = ops.is_scatter(node) and linearity.is_zero(node.args[0])
        if not (is_scatter or ops.is_pointwise(node)) or not _matmul_reads(node):
            continue
        product = _overwritten(node, unused)
        if product is None or (not is_scatter and product in _read_by(node)):
            continue
        if not product.meta["val"].is_cpu and _reads_wide(node, product):
            continue
        unused.remove(product)
        if is_scatter:
            (zeros, *_) = node.all_input_nodes
            with builder.graph.inserting_before(node):
                node.update_arg(0, _through(builder, zeros, product, any_length))
        else:
            _depending_on(builder, node, product, any_length)


def _overwritten(gradient: fx.Node, products: list[fx.Node]) -> fx.Node | None:
    """The last of the products from which the gradient is computed, if it has the same size."""
    needed = ancestors([gradient])
    found = [product for product in products if product in needed and _fits(gradient, product)]
    return found[-1] if found else None


def _reads_wide(node: fx.Node, product: fx.Node) -> bool:
    """Whether a value is computed from buffers of the product's size that are not the product."""
    read = (n for n in _read_by(node) if n is not product and n.op == "call_function")
    return any(numel(n) >= numel(product) and not ops.is_constant(n) for n in read)


def _read_by(node: fx.Node) -> set[fx.Node]:
    """What a value is computed from, itself or by pointwise values and views."""
    inlined = lambda n: ops.is_pointwise(n) or ops.is_cheap_view(n)
    further = lambda n: n.all_input_nodes if inlined(n) else ()
    return {n for n in walk_once(node.all_input_nodes, further) if not inlined(n)}


def _depending_on(builder: Builder, gradient: fx.Node, other: fx.Node, any_length: bool) -> fx.Node:
    """Let what reads a gradient read it through another value of its rows; returns that."""
    users = list(gradient.users)
    with builder.graph.inserting_before(gradient.next):  # users are in the order of creation
        dependent = _through(builder, gradient, other, any_length)
    for user in users:
        user.replace_input_with(gradient, dependent)
    return dependent


def _through(builder: Builder, gradient: fx.Node, other: fx.Node, any_length: bool) -> fx.Node:
    """The gradient, read through a ``where`` on a value with one element per row, or as many as the
    gradient; as it is if shapes do not allow."""
    *rows, width = gradient.meta["val"].shape
    value = other.meta["val"]
    if value.numel() not in (math.prod(rows), math.prod(rows) * width):
        return gradient
    shape = [*rows, width if value.numel() == math.prod(rows) * width else 1]
    if list(value.shape) != shape:
        if any_length:
            if sum(size != 1 for size in rows) != 1:
                return gradient
            shape[: len(rows)] = [size if size == 1 else -1 for size in rows]
        other = builder.call(aten.reshape.default, other, shape)
    same = builder.call(aten.eq.Tensor, other, other)
    return builder.call(aten.where.self, same, gradient, gradient)


# ---- side readers --------------------------------------------------------------------------------
def _side_readers(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Narrow results of reductions and gathers over the product's rows."""
    found = []
    for node in order:
        if ops.row(node).kind not in ("reduce", "index"):
            continue
        narrow = value_of(node) is not None and numel(node) * 4 < numel(product)
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
