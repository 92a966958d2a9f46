"""Token rules of ops that read or write at index tensors: index, index_put, embedding.

Take ``x[:, i, j]`` with index tensors i and j, in the graph ``aten.index.Tensor(x, [None, i, j])``.
The dims of the result are those of x that are not indexed and, as one *block*, the dims of i and j
broadcast together. The block stands in the place of the indexed dims if those are adjacent,
otherwise in front.

Indexing is token-parallel in two cases:

- The tokens run over dims of x that are not indexed. All tokens use the same indices.
- The tokens run over the block, so each token has indices of its own, and x is a table that all
  tokens share, as in an embedding.

An ``index_put`` that accumulates the values of all tokens in a small table of zeros is a sum over
the tokens: the gradient of such a table, for example that of each expert's bias.

Indices along a token dim of x would pick or move tokens, so they are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from mstpass.graph.advice import RESIZE_FEATURES, ROWWISE, SELECT_FIRST
from mstpass.graph.joint import numel
from mstpass.graph.linearity import is_zero
from mstpass.graph.sizes import same_shape
from mstpass.graph.token_rules import Place, Places, Rule
from mstpass.graph.token_rules.arguments import argument, nodes_at, shape_of
from mstpass.graph.token_rules.views import aligned
from mstpass.graph.tokens import Refusal


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Which dim of an indexed result comes from where.

    Attributes:
        start: the first dim of the block in the result.
        block: the shape of the block.
        kept: for each dim of the result outside the block, in order, the dim of the source.
    """

    start: int
    block: tuple[int, ...]
    kept: tuple[int, ...]

    def result_dim(self, source_dim: int) -> int:
        place = self.kept.index(source_dim)
        return place if place < self.start else place + len(self.block)

    def result_shape(self, source: Sequence[int]) -> list[int]:
        kept = [source[d] for d in self.kept]
        return [*kept[: self.start], *self.block, *kept[self.start :]]


def _indices(node: fx.Node) -> list[fx.Node]:
    return [i for i in argument(node, "indices") if isinstance(i, fx.Node)]


def _layout(node: fx.Node) -> _Layout | Refusal:
    (source,), indices = nodes_at(node, 0), argument(node, "indices")
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in _indices(node)):
        reason = f"{node.target} selects by a mask: the size of its result depends on data"
        return Refusal(SELECT_FIRST(reason))
    indexed = tuple(d for d, i in enumerate(indices) if isinstance(i, fx.Node))
    block = torch.broadcast_shapes(*(shape_of(i) for i in _indices(node)))
    kept = tuple(d for d in range(len(shape_of(source))) if d not in indexed)
    adjacent = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    return _Layout(indexed[0] if adjacent else 0, tuple(block), kept)


# ---- reading ------------------------------------------------------------------------------------
def _read(node: fx.Node) -> Places | Refusal:
    layout, (source,) = _layout(node), nodes_at(node, 0)
    if isinstance(layout, Refusal):
        return layout
    resizes = node.target is torch.ops.aten._unsafe_index.Tensor
    advice = RESIZE_FEATURES if resizes else SELECT_FIRST

    def of_index(index: fx.Node) -> list[Place]:
        in_block = aligned(shape_of(index), layout.block)
        return [d + layout.start if isinstance(d, int) else d for d in in_block]

    of_source: list[Place] = [advice("{} picks tokens")] * len(shape_of(source))
    for dim in layout.kept:
        of_source[dim] = layout.result_dim(dim)
    return [(source, of_source), *((n, of_index(n)) for n in _indices(node))]


read = Rule(_read)

# ---- writing ------------------------------------------------------------------------------------
_FEWER = 8  # a table that is summed up in chunks has fewer elements than all values by this factor
_BY_TOKEN = SELECT_FIRST("{} writes at indices that depend on the token")
_AT_TOKENS = SELECT_FIRST("{} writes at indices along a token dim")


def _put(node: fx.Node) -> Places | Refusal:
    """``index_put``: token-parallel only if no token dim is indexed.

    It sums over the tokens if they are all rows of the one index tensor, and the values have a row
    for each.
    """
    layout, (base, values) = _layout(node), nodes_at(node, 0, 2)
    if isinstance(layout, Refusal):
        return layout
    shape = shape_of(values)
    target = layout.result_shape(shape_of(base))
    is_sum = len(_indices(node)) == 1 and argument(node, "accumulate") and is_zero(base)
    is_sum = is_sum and same_shape(list(shape), target) and _FEWER * numel(base) <= numel(values)
    block = range(layout.start, layout.start + len(layout.block))
    source_dims: dict[int, Place] = {layout.result_dim(d): d for d in layout.kept}
    source_dims |= {d: layout.start - 1 - d if is_sum else _BY_TOKEN for d in block}
    of_values = [source_dims[d] if isinstance(d, int) else d for d in aligned(shape, target)]
    return [
        (base, [d if d in layout.kept else _AT_TOKENS for d in range(len(shape_of(base)))]),
        (values, of_values),
        *(
            (n, [-1 - d if is_sum else _BY_TOKEN for d in range(len(shape_of(n)))])
            for n in _indices(node)
        ),
    ]


put = Rule(_put, _AT_TOKENS)


# ---- embedding ----------------------------------------------------------------------------------
def _embedding(node: fx.Node) -> Places:
    weight, ids = nodes_at(node, 0, 1)
    return [
        (weight, [ROWWISE("the embedding table itself depends on tokens")] * 2),
        (ids, range(len(shape_of(ids)))),
    ]


embedding = Rule(_embedding, ROWWISE("the tokens run along the features of an embedding"))
