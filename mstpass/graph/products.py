"""Matrix products as plain data: what the time of a product depends on.

A product is ``batch`` times ``[rows, contracted] @ [contracted, columns]``. In a loop over N tokens
one of these four sizes is N, and a chunk has c in its place. Where the tokens are contracted, each
chunk gives a summand: the chunk's product reads and writes the sum, which may be in a wider dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import nbytes, value_of
from mstpass.graph.sizes import hint_shape
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


def token_product(node: fx.Node, spec: Spec | None) -> TokenProduct | None:
    """The product of a region's node; ``spec`` are the token dims of its result, None for a sum."""
    product = product_of(node)
    if product is None:
        return None
    return TokenProduct(product, _tokens_in(node, spec[-1] if spec else None))


def head_product(node: fx.Node, spec: Spec | None, features: int) -> TokenProduct | None:
    """The product of a node of a region of heads, as one over the features of all heads."""
    product = product_of(node)
    if product is None:
        return None
    tokens_in = _tokens_in(node, spec[0] if spec else None)
    return TokenProduct(product, tokens_in, getattr(product, tokens_in) / features)


def _tokens_in(node: fx.Node, dim: int | None) -> str:
    """Which size of a product a dim of its result is; None: the contracted one."""
    out = value_of(node)
    if dim is None or out is None:
        return CONTRACTED
    return {-1: COLUMNS, -2: ROWS}.get(dim - out.dim(), BATCH)
