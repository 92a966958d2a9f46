"""What products, and loops, compute, as plain data. The costs of a device turn it into a time.

A product is ``batch`` times ``[rows, contracted] @ [contracted, columns]``. In a loop over N tokens
one of these four sizes is N, and a chunk has c in its place. Where the tokens are contracted, each
chunk gives a summand: the chunk's product reads and writes the sum, which may be in a wider dtype.

A loop over tokens or heads has products, other traffic and kernels, for each length of a chunk
(device_costs.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention
from mstpass.graph.axes import ALONG_A_DIM
from mstpass.graph.buffer_ops import summands
from mstpass.graph.call_work import computed_bytes, moved_bytes
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.sizes import hint, hint_shape
from mstpass.graph.tokens import Spec

BATCH, ROWS, CONTRACTED, COLUMNS = "batch", "rows", "contracted", "columns"


@dataclasses.dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
        dtype: that of the matrices.
        result_bytes: bytes of an element of the result.
        bias_bytes: bytes of what is added to the product.
        accumulates: the part of all runs that read the result, add to it and write it.
    """

    rows: int
    contracted: int
    columns: int
    batch: int = 1
    dtype: torch.dtype = torch.float32
    result_bytes: int = 4
    bias_bytes: int = 0
    accumulates: float = 0.0

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.rows * self.contracted * self.columns

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written, each element once."""
        read = self.batch * self.contracted * (self.rows + self.columns) * self.dtype.itemsize
        return read + self._result_traffic + self.bias_bytes

    @property
    def accumulated_bytes(self) -> int:
        """Bytes read and written of a result that the product is added to; 0 of other products."""
        return self._result_traffic if self.accumulates else 0

    @property
    def _result_traffic(self) -> int:
        written = self.batch * self.rows * self.columns * self.result_bytes
        return int(written * (1 + self.accumulates))


@dataclasses.dataclass(frozen=True)
class TokenProduct:
    """A product over all tokens, and which of its sizes they are.

    Attributes:
        block: that size for one token. It is not 1 where a loop runs over the features of heads, of
            which keys and values may have fewer than queries.
        least_sum_bytes: bytes of an element of the sum over chunks, where the tokens are
            contracted, if the result has no more (``LoopPlan.least_sum_bytes``).
        total: name of the sum of several products that it is a part of, if it is.
    """

    whole: Product
    tokens_in: str
    block: float = 1.0
    least_sum_bytes: int = 4
    total: str | None = None

    def over(self, tokens: int) -> TokenProduct:
        """The same product over another number of tokens."""
        size = max(1, round(tokens * self.block))
        whole = dataclasses.replace(self.whole, **{self.tokens_in: size})  # type: ignore[arg-type]
        return dataclasses.replace(self, whole=whole)

    def of_chunk(self, rows: int) -> Product:
        """The product of a chunk of ``rows`` tokens."""
        chunk = self.over(rows).whole
        if self.tokens_in != CONTRACTED:
            return chunk
        wide = max(self.least_sum_bytes, self.whole.result_bytes)
        later = 1 - rows * self.block / self.whole.contracted  # the first chunk adds to nothing
        return dataclasses.replace(chunk, accumulates=max(0.0, later), result_bytes=wide)


def joined(products: Sequence[Product]) -> Sequence[Product]:
    """Products that are added to one total: one product of their factors side by side, if it pays.

    They stay apart where the copies of the factors are as large as the additions to the total that
    this saves, and where they are not alike.
    """
    first, contracted = products[0], sum(product.contracted for product in products)
    alike = {dataclasses.replace(product, contracted=contracted) for product in products}
    if len(alike) > 1 or first.batch > 1:
        return products
    factors_bytes = contracted * (first.rows + first.columns) * first.dtype.itemsize
    saved_bytes = (len(products) - 1) * first.rows * first.columns * first.result_bytes
    return tuple(alike) if factors_bytes < saved_bytes else products


def product_of(node: fx.Node) -> Product | None:
    """The product that a node computes; None for all other nodes.

    Symbolic sizes count with their hint (sizes.py). Rows that are grouped by expert count as
    groups of equal size.
    """
    factors, has_bias = _factors(node)
    out, shapes = value_of(node), [hint_shape(v) for v in map(value_of, factors) if v is not None]
    if out is None or len(shapes) != 2 or min(map(len, shapes)) < 2 or out.dim() < 2:
        return None
    *batch, rows, columns = hint_shape(out)
    contracted, count = shapes[0][-1], math.prod(batch)
    if len(shapes[0]) < out.dim():  # grouped: the sum over the rows of each expert
        contracted = max(1, contracted // count)
    elif len(shapes[1]) > out.dim():  # grouped: each expert's weights for its rows
        count = shapes[1][0]
        rows = max(1, rows // count)
    operand = value_of(factors[0])
    assert operand is not None, "the operand is known"
    bias = set(node.all_input_nodes) - set(factors) if has_bias else ()
    return Product(
        rows=rows,
        contracted=contracted,
        columns=columns,
        batch=count,
        dtype=operand.dtype,
        result_bytes=out.element_size(),
        bias_bytes=sum(map(nbytes, bias)),
    )


def _factors(node: fx.Node) -> tuple[tuple[fx.Node, ...], bool]:
    """Both matrices of a product, none of other nodes; and whether it has a bias."""
    factors = ops.row(node).factors
    if factors is None:
        return (), False
    matrices = node.args[factors.left : factors.left + 2]
    return tuple(n for n in matrices if isinstance(n, fx.Node)), factors.left > 0


def _tokens_in(node: fx.Node, dim: int | None) -> str:
    """Which size of a product a dim of its result is; None: the contracted one."""
    out = value_of(node)
    if dim is None or out is None:
        return CONTRACTED
    return {-1: COLUMNS, -2: ROWS}.get(dim - out.dim(), BATCH)


# ---- products ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class LoopWork:
    """The work of a loop over all its tokens.

    Attributes:
        products: the products whose sizes depend on the tokens.
        computed_bytes: what a CPU moves while it computes all other ops (call_work.py).
        moved_bytes: what all other ops read and write once they are fused (call_work.py).
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
    along_a_dim = axis in ALONG_A_DIM
    num_tokens = count * features_of_head(members, count) if along_a_dim else count
    totals = _totals(members) if along_a_dim else {}
    products, computed, moved = list[TokenProduct](), 0.0, 0.0
    stages: dict[fx.Node, int] = {}
    kernels = set()
    for node, spec in members.items():
        if is_attention(node):
            continue
        # what reads a product is in a later kernel
        before = (stages[n] + ops.is_matmul(n) for n in node.all_input_nodes if n in stages)
        stages[node] = max(before, default=0)
        if ops.is_view(node):
            continue
        if (whole := product_of(node)) is None:
            computed += computed_bytes(node)
            moved += moved_bytes(joint, node)
            kernels.add(stages[node])
            continue
        tokens_in = _tokens_in(node, spec[0 if along_a_dim else -1] if spec else None)
        block = getattr(whole, tokens_in) / num_tokens if along_a_dim else 1.0
        products.append(TokenProduct(whole, tokens_in, block, least_sum_bytes, totals.get(node)))
    return LoopWork(num_tokens, tuple(products), computed, moved, len(products) + len(kernels))


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
