"""The forms of projections and of attention that loops over heads, or over rows of attention, need.

``products_by_section``: the product that projects queries, keys and values at once is divided.

A *section* is a range of the columns of a product, which one reader takes. With two of them::

    q, k = split(x @ W)                       q = x @ W[:, :a],   k = x @ W[:, a:]

    G = cat(dq, dk)
    dx = G @ W'                               dx = dq @ W'[:a] + dk @ W'[a:]
    dW = G.t() @ x                            dW = cat(dq.t() @ x, dk.t() @ x)
    db = sum(G)                               db = cat(sum(dq), sum(dk))

A group of heads has columns in every section, so no slice of the undivided product belongs to it.
Only products of which attention reads sections are divided, with their gradients, part by part
(unstack.py).

``bias_after_product``: that of attention's output is added later, as heads can add up sums.

    addmm(bias, x, weight)  =  mm(x, weight) + bias

Each group of heads has its share of the product; the bias is added once. Only products of values
that attention returns are rewritten, seen through views and copies.

``unused_random_state``: attention's backward gets zeros for a state that it does not read.

Some attention ops return, besides their result, the state of the generator from which their forward
drew its dropout; the backward draws the same numbers from it. Without dropout nobody reads it. It
has no heads, so a loop over heads could neither slice nor stack it.

``gradients_in_parts``: a norm's gradient by the keys and values, apart from that by the queries.

What the queries, keys and values of attention are computed from, ``n = norm(x)``, has a gradient of
three terms, and ``x`` one that is linear in it::

    before    dn = dn_q + dn_kv               dx = dh + norm'(dn)
    after     p = dh + norm'(dn_q)            dx = p + norm'(dn_kv)

A loop over chunks of queries has ``dn_q`` of its chunk, and ``dn_kv`` only once all chunks have run
(regions/blocks.py). So it returns ``p``, where it would return ``dh`` and ``dn_q``.

Pseudo-code, for each backward of attention, of what depends on the gradients of keys or values::

    of each node: its part by these, and its part by other gradients
    where an op has both: apply it to each, as it is linear in them
    where a product, or an op that is not linear, reads the value: the sum of both
    a cast to a wider dtype that ends the sums: of the sum
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import (
    held_by_item,
    is_attention,
    is_attention_item,
    is_backward,
    is_product,
    is_summed,
)
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated, rewritten
from mstpass.graph.sizes import is_static, same_shape
from mstpass.graph.token_rules.arguments import argument, dims_of, shape_of
from mstpass.normalize.divided_products import Division
from mstpass.normalize.indexing import as_slice
from mstpass.normalize.parts import Parts
from mstpass.normalize.unstack import divided
from mstpass.walk import walk_once

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def products_by_section(joint: JointGraph) -> Rewritten:
    """Divide the products of which attention reads sections, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that were changed or made; the graph itself if there
        are none.
    """
    return repeated(joint, _next_sections, _divided)


def _next_sections(
    joint: JointGraph, tried: Container[str]
) -> tuple[list[str], tuple[list[fx.Node], Division]] | None:
    """A product that was not tried: the items of its split, and its sections."""
    for product in joint.nodes:
        if product.name in tried or product.target not in _PRODUCTS or product in joint.backward:
            continue
        split = _only_reader_through_reshapes(product)
        if split is None or split.target not in _SPLITS or not _along_last(split):
            continue
        sizes = tuple(value.shape[-1] for value in split.meta["val"])
        if any(map(_reaches_attention, split.users)):
            division = Division(product.name, *Parts.of_sizes(1, sizes))
            return [product.name], ([*split.users], division)
    return None


def _divided(
    joint: JointGraph, found: tuple[list[fx.Node], Division]
) -> tuple[JointGraph, set[str]]:
    items, division = found
    joint, _ = rewritten(joint, items, as_slice)
    return divided(joint, [division])


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
    rank = len(shape_of(split.all_input_nodes[0]))
    return dims_of(split, rank, "dim") == [rank - 1]


def _reaches_attention(item: fx.Node) -> bool:
    """Whether attention reads what is computed from an item without another projection."""
    goes_on = lambda node: node.op == "call_function" and not ops.is_matmul(node)
    reached = walk_once([item], lambda node: filter(goes_on, node.users))
    readers = (user for node in reached for user in node.users)
    return any(is_attention(user) or ops.is_batched_matmul(user) for user in readers)


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
    """A product and a sum."""
    bias, left, right = biased.args
    product = rewriting.builder.call(aten.mm.default, left, right)
    return rewriting.builder.call(aten.add.Tensor, product, bias)


def unused_random_state(joint: JointGraph) -> Rewritten:
    """Replace the state that backwards of attention without dropout are given, in a copy.

    Returns:
        The copy and the names of the backwards in it that read zeros now; the graph itself if there
        is no such state.
    """
    zeros = lambda copy, node: copy.builder.filled(shape_of(node), 0, node.meta["val"])
    return rewritten(joint, filter(_is_unused_state, joint.nodes), zeros)


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


# ---- gradients in parts --------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Parts:
    """A value as a sum: by the gradients of keys and values, and by others; None for no part."""

    by_keys: fx.Node | None
    by_others: fx.Node | None


def gradients_in_parts(joint: JointGraph) -> Rewritten:
    """Split such gradients, in a copy of the graph.

    Returns:
        The copy and the names of the sums of two parts in it; the graph itself if there are none.
    """
    attention = [node for node in joint.nodes if is_attention(node) and is_backward(node)]
    if not attention:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    gradients = set(rewriting.joint.backward)
    splits = [
        _Split(rewriting, rewriting.joint.by_name[node.name], gradients).run() for node in attention
    ]
    return rewriting.result() if any(splits) else (joint, frozenset())


class _Split:
    """The parts of what depends on one attention's gradients.

    Args:
        gradients: the nodes of the backward; it grows.
    """

    def __init__(self, rewriting: Rewriting, attention: fx.Node, gradients: set[fx.Node]):
        self.rewriting, self.gradients = rewriting, gradients
        self.nodes = rewriting.joint.nodes[rewriting.joint.index[attention] + 1 :]
        self.parts = {item: _Parts(item, None) for item in attention.users if is_summed(item)}
        self.split: dict[fx.Node, _Parts] = {}  # where both parts have nodes of their own

    def run(self) -> bool:
        """Rewrite the graph; returns whether there are sums."""
        for node in self.nodes:
            operands = [n for n in node.all_input_nodes if n in self.gradients]
            if node.op != "call_function" or not any(n in self.parts for n in operands):
                continue
            parts = self._parts_of(node, operands)
            if parts is None:
                continue
            if parts.by_others is not None:
                self.split[node] = parts
                if any(map(is_product, ops.readers_through_views(node))):
                    continue  # it exists as a whole
            self.parts[node] = parts
        for node in reversed([*self.split]):
            if ops.widens(node) and all(user not in self.split for user in node.users):
                del self.split[node]  # it reads the sum, which takes less memory
        found = False
        for node, parts in self.split.items():
            readers = [user for user in node.users if user not in self.split]
            if readers:  # of the value as a whole
                total = self._call(node, aten.add.Tensor, parts.by_others, parts.by_keys)
                self.rewriting.replace(node, total, readers)
                found = True
        return found

    def _parts_of(self, node: fx.Node, operands: list[fx.Node]) -> _Parts | None:
        """The parts of a node; None where it reads its operands as a whole."""
        parts = [self.parts.get(n, _Parts(None, n)) for n in operands]
        if all(part.by_others is None for part in parts):
            return _Parts(node, None)
        is_plain = value_of(node) is not None and not ops.is_matmul(node)
        if not is_plain or not ops.row(node).is_linear(node, set(operands)):
            return None
        by_keys = self._applied(node, operands, [part.by_keys for part in parts])
        by_others = self._applied(node, operands, [part.by_others for part in parts])
        return None if by_keys is None or by_others is None else _Parts(by_keys, by_others)

    def _applied(
        self, node: fx.Node, operands: list[fx.Node], parts: list[fx.Node | None]
    ) -> fx.Node | None:
        """The op on one part of each operand; None if it cannot do without one that has none."""
        given = {old: new for old, new in zip(operands, parts, strict=True) if new is not None}
        if len(given) == len(operands):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, n))
            return self._call(node, node.target, *args, **kwargs)
        is_sum = node.target is aten.add.Tensor and not node.kwargs
        alike = all(
            same_shape(n.meta["val"].shape, node.meta["val"].shape)
            and n.meta["val"].dtype == node.meta["val"].dtype
            for n in operands
        )
        return next(iter(given.values())) if is_sum and alike else None

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.rewriting.before(node):
            new = self.rewriting.builder.call(target, *args, **kwargs)
        self.gradients.add(new)
        return new
