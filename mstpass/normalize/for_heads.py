"""The forms of projections and of attention that loops over heads need.

``products_by_section``: the product that projects queries, keys and values at once is divided.

A *section* is a range of the columns of a product, which one reader takes. With two of them::

    q, k = split(x @ W)                       q = x @ W[:, :a],   k = x @ W[:, a:]

    G = cat(dq, dk)
    dx = G @ W'                               dx = dq @ W'[:a] + dk @ W'[a:]
    dW = G.t() @ x                            dW = cat(dq.t() @ x, dk.t() @ x)
    db = sum(G)                               db = cat(sum(dq), sum(dk))

A group of heads has columns in every section, so no slice of the undivided product belongs to it.
Only products of which attention reads sections are divided, and only with their gradients.

``bias_after_product``: that of attention's output is added later, as heads can add up sums.

    addmm(bias, x, weight)  =  mm(x, weight) + bias

Each group of heads has its share of the product; the bias is added once. Only products of values
that attention returns are rewritten, seen through views and copies.

``unused_random_state``: attention's backward gets zeros for a state that it does not read.

Some attention ops return, besides their result, the state of the generator from which their forward
drew its dropout; the backward draws the same numbers from it. Without dropout nobody reads it. It
has no heads, so a loop over heads could neither slice nor stack it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import held_by_item, is_attention, is_attention_item
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import is_static
from mstpass.graph.token_rules.arguments import argument, shape_of
from mstpass.walk import walk, walk_once

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclasses.dataclass(frozen=True)
class _Sections:
    """A product, the split of its result, and the gradient that its sections' gradients make up."""

    product: str
    split: str
    gradient: str
    bounds: tuple[tuple[int, int], ...]


def products_by_section(joint: JointGraph) -> Rewritten:
    """Divide the products of which attention reads sections, in a copy of the graph.

    Returns:
        The copy and the names of the new products in it; the graph itself if there are none.
    """
    found = [match for node in joint.nodes if (match := _match(joint, node)) is not None]
    if not found:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    names = {node.name for match in found for node in _Division(rewriting, match).divide()}
    return rewriting.finished(), frozenset(names)


# ---- which products ------------------------------------------------------------------------------
def _match(joint: JointGraph, product: fx.Node) -> _Sections | None:
    if product.target not in _PRODUCTS or product in joint.backward or product.kwargs:
        return None
    split = _only_reader_through_reshapes(product)
    if split is None or split.target not in _SPLITS or not _along_last(split):
        return None
    items = list(split.users)
    if not any(map(_reaches_attention, items)):
        return None
    sizes = [value.shape[-1] for value in split.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    ends = list(itertools.accumulate(sizes))
    gradient = _gradient(joint, product, sizes)
    if gradient is None:
        return None
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return _Sections(product.name, split.name, gradient.name, bounds)


def _only_reader_through_reshapes(node: fx.Node) -> fx.Node | None:
    """The reader of a product, if there is one and the columns stay one dim on the way to it."""
    columns = shape_of(node)[-1]
    while len(node.users) == 1:
        (reader,) = node.users
        if not ops.is_view_by_shape(reader):
            return reader
        if shape_of(reader)[-1] != columns:
            return None
        node = reader
    return None


def _along_last(split: fx.Node) -> bool:
    rank = split.all_input_nodes[0].meta["val"].dim()
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    return dim in (-1, rank - 1)


def _reaches_attention(item: fx.Node) -> bool:
    """Whether attention reads what is computed from an item without another projection."""
    goes_on = lambda node: node.op == "call_function" and not ops.is_matmul(node)
    reached = walk_once([item], lambda node: filter(goes_on, node.users))
    readers = (user for node in reached for user in node.users)
    return any(is_attention(user) or ops.is_batched_matmul(user) for user in readers)


def _gradient(joint: JointGraph, product: fx.Node, sizes: list[int]) -> fx.Node | None:
    """The gradient of the product's result, if every reader of it can be divided."""
    weight = ops.base_of(ops.matmul_factors(product)[1])
    for node in joint.nodes:
        if node.target is not aten.mm.default or node not in joint.backward:
            continue
        left, right = ops.matmul_factors(node)
        while ops.is_view_by_shape(left):
            left = left.all_input_nodes[0]
        if left.target is not aten.cat.default or ops.base_of(right) is not weight:
            continue
        parts: Any = left.args[0]
        if [shape_of(p)[-1] for p in parts] != sizes or len(left.args) < 2:
            continue
        readers = list(_readers(left))
        if left.args[1] in (-1, left.meta["val"].dim() - 1) and all(
            _can_divide(reader, source) for source, reader in readers
        ):
            return left
    return None


def _readers(gradient: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of the gradient as a matrix, or of that transposed, and a reader of it."""

    def shows(node: fx.Node) -> bool:
        is_matrix = node.target is aten.permute.default and node.meta["val"].dim() == 2
        return ops.is_view_by_shape(node) or is_matrix

    for shown in walk([gradient], lambda node: filter(shows, node.users)):
        yield from ((shown, user) for user in shown.users if not shows(user))


def _can_divide(reader: fx.Node, source: fx.Node) -> bool:
    """Whether it is known how a reader of the gradient becomes several."""
    if reader.target is aten.mm.default:
        return reader.args[0] is source
    is_sum = reader.target is aten.sum.dim_IntList and source.target is not aten.permute.default
    return is_sum and list(reader.args[1]) == [0]  # type: ignore[arg-type]


def _divided(
    builder: Builder, reader: fx.Node, parts: list[fx.Node], match: _Sections, transposed: bool
) -> fx.Node:
    """What a reader becomes: the gradient of the bias, of the weight, or of the tokens."""
    call, other = builder.call, reader.args[1]
    if reader.target is not aten.mm.default:
        sums = [call(reader.target, part, *reader.args[1:], **reader.kwargs) for part in parts]
        return call(aten.cat.default, sums, -1)
    if transposed:
        products = [
            call(aten.mm.default, call(aten.permute.default, part, [1, 0]), other) for part in parts
        ]
        return call(aten.cat.default, products, 0)
    products = [
        call(aten.mm.default, part, call(aten.slice.Tensor, other, 0, *bounds))
        for part, bounds in zip(parts, match.bounds, strict=True)
    ]
    return functools.reduce(functools.partial(call, aten.add.Tensor), products)


# ---- the rewrite ---------------------------------------------------------------------------------
class _Division:
    """Divides one product and the readers of its gradient."""

    def __init__(self, rewriting: Rewriting, match: _Sections):
        self.rewriting, self.builder, self.match = rewriting, rewriting.builder, match
        nodes = (match.product, match.split, match.gradient)
        self.product, self.split, self.gradient = map(rewriting.joint.by_name.__getitem__, nodes)

    def divide(self) -> list[fx.Node]:
        """Returns the products of the forward."""
        items = sorted(self.split.users, key=lambda item: item.args[1])  # type: ignore[arg-type,return-value]
        products = list(map(self._divide_forward, items))
        for source, reader in list(_readers(self.gradient)):
            with self.builder.graph.inserting_before(reader):
                given: Any = self.gradient.args[0]
                parts = [self._as_matrix(part, source) for part in given]
                transposed = source.target is aten.permute.default
                result = _divided(self.builder, reader, parts, self.match, transposed)
            self.rewriting.replace(reader, result)
        return products

    def _divide_forward(self, item: fx.Node) -> fx.Node:
        start, end = self.match.bounds[item.args[1]]  # type: ignore[index]
        builder, product = self.builder, self.product
        *bias, left, right = product.args
        with builder.graph.inserting_before(product):
            columns = builder.call(aten.slice.Tensor, right, 1, start, end)
            parts = [builder.call(aten.slice.Tensor, b, -1, start, end) for b in bias]
            built = builder.call(product.target, *parts, left, columns)
            built.meta.update(policy_meta(product))
        with builder.graph.inserting_before(item):
            result = self._reshaped(built, self.split.all_input_nodes[0], end - start)
        self.rewriting.replace(item, result)
        return built

    def _reshaped(self, section: fx.Node, whole: fx.Node, columns: int) -> fx.Node:
        """The section in the shape that the undivided product has in front of the split."""
        if whole is self.product:
            return section
        sizes: Any = whole.args[1]
        return self.builder.call(aten.view.default, section, [*sizes[:-1], columns])

    def _as_matrix(self, part: fx.Node, source: fx.Node) -> fx.Node:
        """A section of the gradient as a matrix ``[N, columns]``."""
        matrix = source.all_input_nodes[0] if source.target is aten.permute.default else source
        if matrix is self.gradient:
            return part
        sizes: Any = matrix.args[1]
        columns = part.meta["val"].shape[-1]
        return self.builder.call(aten.reshape.default, part, [*sizes[:-1], columns])


def bias_after_product(joint: JointGraph) -> Rewritten:
    """Rewrite the biased products of attention's results, in a copy of the graph.

    Returns:
        The copy and the names of the products in it; the graph itself if it has no such product.
    """
    return rewritten(joint, filter(_is_output_projection, joint.nodes), _product_and_sum)


def _is_output_projection(node: fx.Node) -> bool:
    if node.target is not aten.addmm.default or node.kwargs:
        return False
    source = node.args[1]
    assert isinstance(source, fx.Node), "the source is a node"
    while (ops.is_cheap_view(source) or ops.is_copy(source)) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return is_attention_item(source) or source.target is aten.bmm.default


def _product_and_sum(rewriting: Rewriting, biased: fx.Node) -> fx.Node:
    """Replace the node by a product and a sum; returns the product."""
    call = rewriting.builder.call
    bias, left, right = biased.args
    with rewriting.graph.inserting_before(biased):
        product = call(aten.mm.default, left, right)
        total = call(aten.add.Tensor, product, bias)
    for node in (product, total):
        node.meta.update(policy_meta(biased))
    rewriting.replace(biased, total)
    return product


def unused_random_state(joint: JointGraph) -> Rewritten:
    """Replace the state that backwards of attention without dropout are given, in a copy.

    Returns:
        The copy and the names of the backwards in it that read zeros now; the graph itself if there
        is no such state.
    """
    if not any(_is_unused_state(node) for node in joint.nodes):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    readers: set[str] = set()
    for node in rewriting.joint.nodes:
        value = value_of(node)
        if value is not None and _is_unused_state(node):
            with rewriting.graph.inserting_before(node.next):
                zero = rewriting.builder.filled(value.shape, 0, value)
            readers.update(user.name for user in node.users)
            rewriting.replace(node, zero)
    return rewriting.finished(), frozenset(readers)


def _is_unused_state(node: fx.Node) -> bool:
    """Whether only backwards of attention read the node, a state from which they do not draw."""
    if not is_attention_item(node) or held_by_item(node) is not None:
        return False
    value = value_of(node)
    readers = list(node.users)
    return (
        value is not None
        and is_static(value)
        and bool(readers)
        and all(is_attention(n) and argument(n, "dropout_p") == 0 for n in readers)
    )
