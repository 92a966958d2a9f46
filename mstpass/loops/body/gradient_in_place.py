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

``scatter_last`` adds elements to a gradient once it is computed, not to zeros beforehand. The
gradient of logits of which the loss gathers several log-probabilities is the sum of a scatter
and of a pointwise value. A scatter writes into a buffer of its own; here it is that of the sum::

    zeros.scatter_add(dim, index, a) + b   =   b.scatter_add(dim, index, a)

The result differs by rounding where an index comes twice.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors, numel, value_of
from mstpass.graph.materialization import REALIZE, materialize
from mstpass.graph.sizes import same_shape
from mstpass.graph.token_rules.arguments import dims_of, has_argument
from mstpass.walk import walk, walk_once

aten = torch.ops.aten


def write_gradients_in_place(builder: Builder, any_length: bool = False) -> None:
    """Make each gradient of a matmul's result depend on the side readers of that result.

    Args:
        any_length: the chunk's length is not fixed.
    """
    _read_products(builder, any_length)
    _write_gathered(builder)
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
        if product is None or (not is_scatter and _reads(node, product)):
            continue
        if not product.meta["val"].is_cpu and _reads_wide(node, product):
            continue
        unused.remove(product)
        if is_scatter:
            with builder.graph.inserting_before(node):
                node.update_arg(0, _reading(builder, node.args[0], product, any_length))
        else:
            users = list(node.users)
            with builder.graph.inserting_before(node.next):
                gradient = _reading(builder, node, product, any_length)
            for user in users:
                user.replace_input_with(node, gradient)


def _overwritten(gradient: fx.Node, products: list[fx.Node]) -> fx.Node | None:
    """The last of the products from which the gradient is computed, if it has the same size."""
    needed = ancestors([gradient])
    found = [product for product in products if product in needed and _fits(gradient, product)]
    return found[-1] if found else None


def _reads(node: fx.Node, product: fx.Node) -> bool:
    """Whether a pointwise value reads the product, itself or by other such values."""
    return product in _read_by(node)


def _reads_wide(node: fx.Node, product: fx.Node) -> bool:
    """Whether a value is computed from buffers of the product's size that are not the product."""
    read = (n for n in _read_by(node) if n is not product and n.op == "call_function")
    return any(numel(n) >= numel(product) and not ops.is_constant(n) for n in read)


def _read_by(node: fx.Node) -> set[fx.Node]:
    """What a value is computed from, itself or by pointwise values and views."""
    inlined = lambda n: ops.is_pointwise(n) or ops.is_cheap_view(n)
    further = lambda n: n.all_input_nodes if inlined(n) else ()
    return {n for n in walk_once(node.all_input_nodes, further) if not inlined(n)}


def _reading(builder: Builder, gradient: fx.Node, product: fx.Node, any_length: bool) -> fx.Node:
    """The gradient, read through a ``where`` on the product; as it is if shapes do not allow."""
    shape = list(gradient.meta["val"].shape)
    if list(product.meta["val"].shape) != shape:
        if any_length:
            rows = _of_any_length([*shape[:-1], 1])
            if rows is None:
                return gradient
            shape = [*rows[:-1], shape[-1]]
        product = builder.call(aten.reshape.default, product, shape)
    same = builder.call(aten.eq.Tensor, product, product)
    return builder.call(aten.where.self, same, gradient, gradient)


# ---- side readers --------------------------------------------------------------------------------
def _write_gathered(builder: Builder) -> None:
    """Write several elements of each row to memory: else they are read where they are needed."""
    order = {node: i for i, node in enumerate(builder.graph.nodes)}
    products = [node for node in order if ops.is_matmul(node)]
    for product in [p for p in products if _gradients(p, order)]:
        for side in _side_readers(product, order):
            if not ops.is_reduction(side) and _has_several_per_row(side, product):
                readers = list(side.users)
                written = materialize(side)
                for reader in readers:
                    reader.replace_input_with(side, written)


def _has_several_per_row(side: fx.Node, product: fx.Node) -> bool:
    shape, rows = side.meta["val"].shape, product.meta["val"].shape[:-1]
    return shape[-1] > 1 and math.prod(shape[:-1]) == math.prod(rows)


def _side_readers(product: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Narrow results of reductions and gathers over the product's rows."""
    found = []
    for node in order:
        written = node.target is REALIZE
        reader = node.all_input_nodes[0] if written else node
        if ops.row(reader).kind not in ("reduce", "index"):
            continue
        value = value_of(reader)
        narrow = value is not None and numel(reader) * 4 < numel(product)
        if narrow and any(numel(i) >= numel(product) for i in reader.all_input_nodes):
            if _works_along_rows(reader) and product in ancestors([reader]):
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
    value, narrow = gradient.meta["val"], list(side.meta["val"].shape)
    several = side.target is REALIZE and narrow[-1] > 1
    if several:
        narrow[-1] = 1
    shape = _broadcast_shape(narrow, list(value.shape))
    if shape is not None and any_length:
        shape = _of_any_length(shape)
    if shape is None:
        return gradient
    users = list(gradient.users)
    with builder.graph.inserting_before(gradient.next):  # users are in the order of creation
        if several:
            side = builder.call(aten.slice.Tensor, side, len(narrow) - 1, 0, 1)
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


def scatter_last(builder: Builder) -> None:
    """Rewrite all such sums and differences of the graph, in place."""
    for node in list(builder.graph.nodes):
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
            continue
        found = _scatter_and_rest(node)
        if found is None:
            continue
        scatter, rest = found
        dim, index, source = scatter.args[1:4]
        with builder.graph.inserting_before(node):
            if node.target is aten.sub.Tensor:
                negated = rest if scatter is node.args[0] else source
                opposite = builder.call(aten.neg.default, negated)
                rest, source = (opposite, source) if negated is rest else (rest, opposite)
            total = builder.call(aten.scatter_add.default, rest, dim, index, source)
        node.replace_all_uses_with(total)
        builder.graph.erase_node(node)
        builder.graph.erase_node(scatter)


def _scatter_and_rest(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operand that is a scatter into zeros, which nothing else reads, and the other one."""
    first, second = node.args
    for scatter, rest in ((first, second), (second, first)):
        if not isinstance(scatter, fx.Node) or not isinstance(rest, fx.Node):
            continue
        if scatter.target is not aten.scatter_add.default or len(scatter.users) != 1:
            continue
        values = [value_of(n) for n in (node, scatter, rest)]
        like = values[0]
        if linearity.is_zero(scatter.args[0]) and all(
            v is not None and v.dtype == like.dtype and same_shape(v.shape, like.shape)  # type: ignore[union-attr]
            for v in values
        ):
            return scatter, rest
    return None
