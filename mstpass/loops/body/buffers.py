"""The buffers of a loop's body: which values need one, and which share one.

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

``write_gradients_in_place`` lets Inductor write a chunk's gradient into the buffer of its logits.

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
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.attention import is_product
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors, numel, value_of
from mstpass.graph.own_ops import materialize
from mstpass.graph.token_rules.arguments import dims_of, has_argument
from mstpass.walk import walk, walk_once

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


# ---- gradients in place --------------------------------------------------------------------------
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
