"""Sum products over the features of a section in one product.

The gradient of a gated MLP's tokens is a sum of two products, which a loop over sections adds to
one total, ``[N, d]`` in float32. Each of them reads and writes all of it. One product of both
sections side by side does so once::

    dx += d_gate @ W_gate;  dx += d_up @ W_up      [N, section] @ [section, d], twice
    dx += [d_gate | d_up] @ [W_gate ; W_up]        [N, 2 section] @ [2 section, d]

The weights' sections are copied, which is little beside the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import ALONG_A_DIM
from mstpass.graph.buffer_ops import is_product, parts_in_place
from mstpass.graph.builder import Builder
from mstpass.graph.joint import ancestors
from mstpass.graph.products import joined, product_of
from mstpass.plans import LoopPlan

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
