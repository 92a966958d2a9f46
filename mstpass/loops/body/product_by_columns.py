"""A product of which a loop reduces columns alone is computed column by column.

The first round of a contrastive loss finds the maximum and the sum of each column of its logits.
The rows of a chunk's logits lie V elements apart, so a reduction over rows reads one cache line of
each, all of which fall into the same few sets of a CPU's caches. The product of the transposed
factors has the tokens of a column one after the other::

    logits = left @ right = (right^T @ left^T)^T        [c, V]

They differ in their last bits. The gradient of a maximum goes to the logits that equal it, so where
logits have one, all loops compute them in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import numel
from mstpass.graph.recompute_rules import compared
from mstpass.graph.tokens import Spec
from mstpass.walk import walk_once

aten = torch.ops.aten


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
