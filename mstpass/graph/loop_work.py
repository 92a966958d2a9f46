"""What a loop over tokens or heads computes, as plain data: products, other traffic, kernels.

The costs of a device (device_costs.py) turn it into a time, for each length of a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention
from mstpass.graph.axes import ALONG_A_DIM
from mstpass.graph.buffer_ops import summands
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.products import Product, TokenProduct, head_product, joined, token_product
from mstpass.graph.sizes import hint
from mstpass.graph.tokens import Spec
from mstpass.graph.traffic import computed_bytes, moved_bytes


@dataclasses.dataclass(frozen=True)
class LoopWork:
    """The work of a loop over all its tokens.

    Attributes:
        products: the products whose sizes depend on the tokens.
        computed_bytes: what a CPU moves while it computes all other ops (traffic.py).
        moved_bytes: what all other ops read and write once they are fused (traffic.py).
        kernels: about how many kernels one chunk runs.
    """

    tokens: int
    products: tuple[TokenProduct, ...]
    computed_bytes: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 1

    @property
    def operations(self) -> int:
        return sum(p.whole.operations for p in self.products)

    @property
    def operations_per_token(self) -> float:
        return self.operations / self.tokens

    @property
    def dtype(self) -> torch.dtype:
        """That of the largest product's matrices; float32 if there is no product."""
        products = (p.whole for p in self.products)
        largest = max(products, key=lambda product: product.operations, default=None)
        return torch.float32 if largest is None else largest.dtype

    def products_of_chunk(self, rows: int) -> list[Product]:
        """The products of a chunk; those that add up to one total are one where that pays off."""
        by_total: dict[object, list[Product]] = {}
        for number, product in enumerate(self.products):
            by_total.setdefault(product.total or number, []).append(product.of_chunk(rows))
        return [product for of_total in by_total.values() for product in joined(of_total)]

    def summed_in(self, least_sum_bytes: int) -> LoopWork:
        """The same loop with sums over chunks of another dtype (``LoopPlan.least_sum_bytes``)."""
        products = (dataclasses.replace(p, least_sum_bytes=least_sum_bytes) for p in self.products)
        return dataclasses.replace(self, products=tuple(products))

    def over(self, tokens: int) -> LoopWork:
        """The same loop over another number of tokens."""
        growth = tokens / self.tokens
        return dataclasses.replace(
            self,
            tokens=tokens,
            products=tuple(p.over(tokens) for p in self.products),
            computed_bytes=self.computed_bytes * growth,
            moved_bytes=self.moved_bytes * growth,
        )


def loop_work(
    joint: JointGraph,
    members: Mapping[fx.Node, Spec | None],
    axis: str,
    count: int,
    least_sum_bytes: int = 4,
) -> LoopWork:
    """The work of a loop. Attention is no part of it (attention_work.py).

    One over heads is as one over the features of all heads: a product is as slow for a group of
    heads of few features as for a chunk of few tokens, as one of its sizes is small.

    Args:
        members: what it computes, in the graph's order, with its specs; None marks a sum.
        axis: what the chunks cut, and ``count`` how many of them there are.
        least_sum_bytes: as ``LoopPlan`` has it.
    """
    rest = {node: spec for node, spec in members.items() if not is_attention(node)}
    if axis not in ALONG_A_DIM:
        return _work(joint, rest, count, token_product).summed_in(least_sum_bytes)
    features = count * features_of_head(members, count)
    totals = _totals(members)

    def product(node: fx.Node, spec: Spec | None) -> TokenProduct | None:
        found = head_product(node, spec, features)
        return found and dataclasses.replace(found, total=totals.get(node))

    return _work(joint, rest, features, product).summed_in(least_sum_bytes)


def _totals(members: Mapping[fx.Node, Spec | None]) -> dict[fx.Node, str]:
    """The sum of several products that each product is a part of, by the sum's name."""
    sums = [
        node for node, spec in members.items() if spec is None and len(node.all_input_nodes) > 1
    ]
    totals: dict[fx.Node, str] = {}
    for result in reversed(sums):  # the last sum first
        for node in summands(result):
            totals.setdefault(node, result.name)
    return totals


def features_of_head(members: Mapping[fx.Node, Spec | None], num_heads: int) -> int:
    """The features of one head in the products of its region; the most that one of them has."""
    sizes = (value_of(n).shape[s[0]] for n, s in members.items() if s and ops.is_matmul(n))  # type: ignore[union-attr]
    return max(1, max(map(hint, sizes), default=1) // num_heads)


def _work(
    joint: JointGraph,
    members: Mapping[fx.Node, Spec | None],
    num_tokens: int,
    product_in_loop: Callable[[fx.Node, Spec | None], TokenProduct | None],
) -> LoopWork:
    products, computed, moved = [], 0.0, 0.0
    stages: dict[fx.Node, int] = {}
    kernels = set()
    for node, spec in members.items():
        stages[node] = max(
            (stages[n] + _ends_stage(n) for n in node.all_input_nodes if n in stages), default=0
        )
        if ops.is_view(node):
            continue
        product = product_in_loop(node, spec)
        if product is not None:
            products.append(product)
        else:
            computed += computed_bytes(node)
            moved += moved_bytes(joint, node)
            kernels.add(stages[node])
    return LoopWork(num_tokens, tuple(products), computed, moved, len(products) + len(kernels))


def _ends_stage(node: fx.Node) -> bool:
    """Whether readers of the node cannot be fused with what computes it."""
    return ops.is_matmul(node)
