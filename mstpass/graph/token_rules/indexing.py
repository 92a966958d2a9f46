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

from mstpass.graph.joint import numel
from mstpass.graph.linearity import is_zero
from mstpass.graph.sizes import same_shape
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, nodes_at, shape_of
from mstpass.graph.tokens import (
    SUM,
    WHOLE,
    Reduced,
    Refusal,
    Spec,
    align,
    broadcast_source,
    without_ones,
)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Which dim of an indexed result comes from where.

    Attributes:
        indexed: the dims of the source that the index tensors replace.
        start: the first dim of the block in the result.
        block: the shape of the block.
        kept: for each dim of the result outside the block, in order, the dim of the source.
    """

    indexed: tuple[int, ...]
    start: int
    block: tuple[int, ...]
    kept: tuple[int, ...]

    def result_dim(self, source_dim: int) -> int:
        place = self.kept.index(source_dim)
        return place if place < self.start else place + len(self.block)

    def in_block(self, dim: int) -> bool:
        return self.start <= dim < self.start + len(self.block)

    def source_dim(self, result_dim: int) -> int:
        return self.kept[result_dim if result_dim < self.start else result_dim - len(self.block)]

    def result_shape(self, source: Sequence[int]) -> list[int]:
        kept = [source[d] for d in self.kept]
        return [*kept[: self.start], *self.block, *kept[self.start :]]


def _indices(node: fx.Node) -> list[fx.Node]:
    return [i for i in argument(node, "indices") if isinstance(i, fx.Node)]


def _layout(node: fx.Node) -> _Layout | Refusal:
    (source,), indices = nodes_at(node, 0), argument(node, "indices")
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in _indices(node)):
        return Refusal(f"{node.target} selects by a mask: the size of its result depends on data")
    indexed = tuple(d for d, i in enumerate(indices) if isinstance(i, fx.Node))
    block = torch.broadcast_shapes(*(shape_of(i) for i in _indices(node)))
    kept = tuple(d for d in range(len(shape_of(source))) if d not in indexed)
    adjacent = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    return _Layout(indexed, indexed[0] if adjacent else 0, tuple(block), kept)


def _has_one_role(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the operand is only one of source, index and written values."""
    roles = [*node.args[:1], *_indices(node), *node.args[2:3]]
    return sum(role is operand for role in roles) == 1


# ---- reading ------------------------------------------------------------------------------------
def index_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    layout = _layout(node)
    if isinstance(layout, Refusal):
        return layout
    if not _has_one_role(node, operand):
        return Refusal(f"{node.target} indexes a value with itself")
    if operand is node.args[0]:
        if set(spec) & set(layout.indexed):
            return Refusal(f"{node.target} picks tokens")
        return tuple(layout.result_dim(d) for d in spec)
    shape = shape_of(operand)
    dims = align(spec, len(shape), len(layout.block))
    if any(layout.block[d] != shape[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal("an operand is broadcast over the token dims")
    return tuple(layout.start + d for d in dims)


def index_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    layout, (source,) = _layout(node), nodes_at(node, 0)
    if isinstance(layout, Refusal):
        return layout
    if not all(_has_one_role(node, n) for n in node.all_input_nodes):
        return Refusal(f"{node.target} indexes a value with itself")
    inside = [layout.in_block(d) for d in spec]
    if not any(inside):
        whole = dict.fromkeys(_indices(node), WHOLE)
        return {**whole, source: tuple(layout.source_dim(d) for d in spec)}
    if not all(inside):
        return Refusal(f"{node.target} has tokens both in indexed dims and in others")
    return _specs_for_block(node, layout, tuple(d - layout.start for d in spec), source)


def _specs_for_block(
    node: fx.Node, layout: _Layout, spec: Spec, source: fx.Node
) -> OperandSpecs | Refusal:
    needs: OperandSpecs = {source: WHOLE}
    for index in _indices(node):
        need = broadcast_source(shape_of(index), layout.block, spec)
        if isinstance(need, Refusal):
            return need
        needs[index] = need
    return needs


# ---- writing ------------------------------------------------------------------------------------
_FEWER = 8  # a table that is summed up in chunks has fewer elements than all values by this factor


def put_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    """``index_put``: token-parallel only if no token dim is indexed."""
    summed = put_sum_specs(node)
    if summed and spec and summed.get(operand) == spec:
        return SUM
    layout = _layout(node)
    if isinstance(layout, Refusal):
        return layout
    base, values = nodes_at(node, 0, 2)
    if not _has_one_role(node, operand) or operand in _indices(node):
        return Refusal(f"{node.target} writes at indices that depend on the token")
    if operand is base:
        if set(spec) & set(layout.indexed):
            return Refusal(f"{node.target} writes at indices along a token dim")
        return spec
    shape, target = shape_of(values), layout.result_shape(shape_of(base))
    dims = align(spec, len(shape), len(target))
    if any(layout.in_block(d) or target[d] != shape[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal(f"{node.target} writes at indices that depend on the token")
    return tuple(layout.source_dim(d) for d in dims)


def put_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    layout, (base, values) = _layout(node), nodes_at(node, 0, 2)
    result = put_forward(node, base, spec)
    if isinstance(layout, Refusal) or not isinstance(result, tuple):
        return result  # type: ignore[return-value]
    target = layout.result_shape(shape_of(base))
    result_spec = tuple(layout.result_dim(d) for d in spec)
    need = broadcast_source(shape_of(values), target, result_spec)
    if isinstance(need, Refusal):
        return need
    if not all(_has_one_role(node, n) for n in node.all_input_nodes):
        return Refusal(f"{node.target} uses one value in two roles")
    return {**dict.fromkeys(_indices(node), WHOLE), base: spec, values: need}


def put_sum_specs(node: fx.Node) -> OperandSpecs:
    """The specs of the operands of an ``index_put`` that sums over the tokens; empty if none does.

    The tokens are all rows of the one index tensor, and the values have a row for each.
    """
    base, values = nodes_at(node, 0, 2)
    if len(node.args) < 4 or not node.args[3] or len(_indices(node)) != 1 or not is_zero(base):
        return {}
    layout, (index,) = _layout(node), _indices(node)
    if isinstance(layout, Refusal) or not all(_has_one_role(node, n) for n in (index, values)):
        return {}
    shape = list(shape_of(values))
    if not same_shape(shape, layout.result_shape(shape_of(base))):
        return {}
    if _FEWER * numel(base) > numel(values):
        return {}
    block = tuple(range(layout.start, layout.start + len(layout.block)))
    return {
        base: WHOLE,
        index: without_ones(shape_of(index), tuple(range(len(layout.block)))),
        values: without_ones(shape, block),
    }


# ---- embedding ----------------------------------------------------------------------------------
def embedding_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    if operand is node.args[1]:
        return spec
    return Refusal("the embedding table itself depends on tokens")


def embedding_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    weight, ids = nodes_at(node, 0, 1)
    if len(shape_of(node)) - 1 in spec:
        return Refusal("the tokens run along the features of an embedding")
    return {weight: WHOLE, ids: spec}
