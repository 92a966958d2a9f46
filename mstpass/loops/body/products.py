"""Products in a loop's body: several products in one, and one column by column.

``join_products``: products over the features of a section are summed in one product.

The gradient of a gated MLP's tokens is a sum of two products, which a loop over sections adds to
one total, ``[N, d]`` in float32. Each of them reads and writes all of it. One product of both
sections side by side does so once::

    dx += d_gate @ W_gate;  dx += d_up @ W_up      [N, section] @ [section, d], twice
    dx += [d_gate | d_up] @ [W_gate ; W_up]        [N, 2 section] @ [2 section, d]

The weights' sections are copied, which is little beside the total.

``product_by_columns``: of which a loop reduces columns alone.

The first round of a contrastive loss finds the maximum and the sum of each column of its logits.
The rows of a chunk's logits lie V elements apart, so a reduction over rows reads one cache line of
each, all of which fall into the same few sets of a CPU's caches. The product of the transposed
factors has the tokens of a column one after the other::

    logits = left @ right = (right^T @ left^T)^T        [c, V]

They differ in their last bits. The gradient of a maximum goes to the logits that equal it, so where
logits have one, all loops compute them in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import ALONG_A_DIM
from mstpass.graph.buffer_ops import is_product, parts_in_place
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors, numel
from mstpass.graph.loop_work import joined, product_of
from mstpass.graph.recompute_rules import compared
from mstpass.graph.tokens import Spec
from mstpass.plans import LoopPlan
from mstpass.walk import walk_once

aten = torch.ops.aten


def join_products(builder: Builder, loop: LoopPlan) -> None:
    """Join the products that a loop over heads or features adds to each of its totals.

    They stay apart where their factors are larger than the additions that this saves.
    """
    if loop.cut.axis not in ALONG_A_DIM:
        return
    results: Any = builder.graph.output_node().args[0]
    sums = [node for node, item in zip(results, loop.outputs, strict=True) if item.spec is None]
    order = {node: position for position, node in enumerate(builder.graph.nodes)}
    for result in sums:
        parts = sorted(parts_in_place(result), key=order.__getitem__)
        products = [node for node in parts if is_product(node)]
        targets = {node.target for node in products}
        if len(targets) != 1 or not targets <= {aten.mm.default, aten.mm.dtype}:
            continue
        found = [product for product in map(product_of, products) if product is not None]
        if len(joined(found)) < len(products):
            _join(builder, result, products)


def _join(builder: Builder, result: fx.Node, products: Sequence[fx.Node]) -> None:
    last = products[-1]
    lefts, rights = zip(*(node.args[:2] for node in products), strict=True)
    left = _side_by_side(builder, lefts)
    for part in parts_in_place(result):
        if part.target is aten.add.Tensor:  # of what leads to the last product, that is left
            for operand in part.all_input_nodes:
                if last in ancestors([operand]):
                    part.replace_all_uses_with(operand)
    with builder.graph.inserting_before(last):
        right = builder.call(aten.cat.default, list(rights), 0)
        product = builder.call(last.target, left, right, *last.args[2:])
    last.replace_all_uses_with(product)
    builder.graph.eliminate_dead_code()


def _side_by_side(builder: Builder, factors: Sequence[fx.Node]) -> fx.Node:
    """The factors in one buffer; what reads one that the body computes takes it from there."""
    nodes = list(builder.graph.nodes)
    last = max(map(nodes.index, factors))
    with builder.graph.inserting_after(nodes[last]):
        result = builder.call(aten.cat.default, list(factors), 1)
    needed = ancestors([result])
    at, end, late = result, 0, set()
    for factor in factors:
        start, end = end, end + factor.meta["val"].shape[1]
        if factor.op == "placeholder" or ops.is_view(factor):
            continue
        with builder.graph.inserting_after(at):
            at = builder.call(aten.slice.Tensor, result, 1, start, end)
        for user in [user for user in factor.users if user not in needed]:
            user.replace_input_with(factor, at)
        late.add(at)
    for node in nodes[: last + 1]:  # what reads them early comes after them
        if not late.isdisjoint(node.all_input_nodes):
            at.append(node)
            late.add(node)
            at = node
    return result


def products_by_columns(members: Mapping[fx.Node, Spec | None]) -> set[fx.Node]:
    """The products of a loop over tokens that are computed so; all or none.

    Args:
        members: the nodes that the loop computes; None marks a value that is reduced over tokens.
    """
    products = {node for node in members if ops.is_matmul(node)}
    usual = all(node.target is aten.mm.default and members[node] == (0,) for node in products)
    if not usual or have_equals(products):
        return set()
    wide = min(map(numel, products), default=0) // 2
    reduced = [n for n in members if ops.is_reduction(n) and _reads(n, wide)]
    over_tokens = [node for node in reduced if members[node] is None]
    return products if over_tokens and over_tokens == reduced else set()


def have_equals(products: Iterable[fx.Node]) -> bool:
    """Whether values of products are compared with a maximum of theirs, to find those equal to it.

    Products of other shapes, or of transposed factors, may differ from it in their last bits.
    """
    follows = lambda user: ops.is_view(user) or ops.is_pointwise(user)
    wide = walk_once(products, lambda node: filter(follows, node.users))
    return any(compared(user) for node in wide for user in node.users)


def _reads(reduction: fx.Node, wide: int) -> bool:
    return any(numel(operand) >= wide for operand in reduction.all_input_nodes)


def product_by_columns(builder: Builder, left: fx.Node, right: fx.Node) -> fx.Node:
    """``left @ right``, a view of the product of the transposed factors."""
    factors = (builder.call(aten.permute.default, factor, [1, 0]) for factor in (right, left))
    return builder.call(aten.permute.default, builder.call(aten.mm.default, *factors), [1, 0])
