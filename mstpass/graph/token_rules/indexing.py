"""Rules of ops that read or write places given by index tensors, for the op table.

``x[:, i, j]`` with tensors i and j (``aten.index.Tensor(x, [None, i, j])``): the result has x's
dims that are not indexed and, as one *block*, the dims of the broadcast index tensors: in the place
of the indexed dims where those are neighbours, in front otherwise.

It is token-parallel in two ways: tokens run over dims that are not indexed and every token uses the
same indices; or tokens run over the block, each with its indices, and x is a table that all tokens
share (an embedding). Indices along a token dim pick or move tokens: refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from mstpass.graph.token_rules.basic import argument, shape_of
from mstpass.graph.tokens import WHOLE, Refusal, Spec, align, broadcast_source


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where an indexed result's dims come from."""

    indexed: tuple[int, ...]  # dims of the source that index tensors replace
    start: int  # where the block begins in the result
    block: tuple[int, ...]  # its shape
    kept: tuple[int, ...]  # for each other dim of the result, in order, the source's dim

    def result_dim(self, source_dim: int) -> int:
        place = self.kept.index(source_dim)
        return place if place < self.start else place + len(self.block)

    def in_block(self, dim: int) -> bool:
        return self.start <= dim < self.start + len(self.block)

    def source_dim(self, result_dim: int) -> int:
        return self.kept[result_dim if result_dim < self.start else result_dim - len(self.block)]

    def shape(self, source: Sequence[int]) -> list[int]:
        kept = [source[d] for d in self.kept]
        return [*kept[: self.start], *self.block, *kept[self.start :]]


def _indices(node: fx.Node) -> list[fx.Node]:
    return [i for i in argument(node, "indices") if isinstance(i, fx.Node)]


def _layout(node: fx.Node) -> _Layout | Refusal:
    source, indices = node.args[0], argument(node, "indices")
    assert isinstance(source, fx.Node)
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in _indices(node)):
        return Refusal(f"{node.target}: a mask picks as many places as it has ones")
    indexed = tuple(d for d, i in enumerate(indices) if isinstance(i, fx.Node))
    block = torch.broadcast_shapes(*(shape_of(i) for i in _indices(node)))
    kept = tuple(d for d in range(len(shape_of(source))) if d not in indexed)
    neighbours = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    return _Layout(indexed, indexed[0] if neighbours else 0, tuple(block), kept)


def _only(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the operand has one role in the op."""
    roles = [*node.args[:1], *_indices(node), *node.args[2:3]]
    return sum(role is operand for role in roles) == 1


# ---- reading ------------------------------------------------------------------------------------
def index_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    layout = _layout(node)
    if isinstance(layout, Refusal):
        return layout
    if not _only(node, operand):
        return Refusal(f"{node.target} indexes a value with itself")
    if operand is node.args[0]:
        if set(spec) & set(layout.indexed):
            return Refusal(f"{node.target} picks tokens")
        return tuple(layout.result_dim(d) for d in spec)
    shape = shape_of(operand)
    dims = align(spec, len(shape), len(layout.block))
    if any(layout.block[d] != shape[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal("token dims are broadcast")
    return tuple(layout.start + d for d in dims)


def index_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    layout, source = _layout(node), node.args[0]
    assert isinstance(source, fx.Node)
    if isinstance(layout, Refusal):
        return layout
    if not all(_only(node, n) for n in node.all_input_nodes):
        return Refusal(f"{node.target} indexes a value with itself")
    inside = [layout.in_block(d) for d in spec]
    if not any(inside):
        whole = dict.fromkeys(_indices(node), WHOLE)
        return {**whole, source: tuple(layout.source_dim(d) for d in spec)}
    if not all(inside):
        return Refusal(f"{node.target}: tokens over indexed and other dims")
    return _block_needs(node, layout, tuple(d - layout.start for d in spec), source)


def _block_needs(
    node: fx.Node, layout: _Layout, spec: Spec, source: fx.Node
) -> dict[fx.Node, Spec] | Refusal:
    needs: dict[fx.Node, Spec] = {source: WHOLE}
    for index in _indices(node):
        need = broadcast_source(shape_of(index), layout.block, spec)
        if isinstance(need, Refusal):
            return need
        needs[index] = need
    return needs


# ---- writing ------------------------------------------------------------------------------------
def put_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    """index_put: token by token only where no token dim is indexed."""
    layout = _layout(node)
    if isinstance(layout, Refusal):
        return layout
    base, values = node.args[0], node.args[2]
    assert isinstance(base, fx.Node) and isinstance(values, fx.Node)
    if not _only(node, operand) or operand in _indices(node):
        return Refusal(f"{node.target} writes to places that tokens choose")
    if operand is base:
        if set(spec) & set(layout.indexed):
            return Refusal(f"{node.target} writes to places along a token dim")
        return spec
    shape, target = shape_of(values), layout.shape(shape_of(base))
    dims = align(spec, len(shape), len(target))
    if any(layout.in_block(d) or target[d] != shape[s] for d, s in zip(dims, spec, strict=True)):
        return Refusal(f"{node.target} writes to places that tokens choose")
    return tuple(layout.source_dim(d) for d in dims)


def put_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    layout, base, values = _layout(node), node.args[0], node.args[2]
    assert isinstance(base, fx.Node) and isinstance(values, fx.Node)
    result = put_forward(node, base, spec)
    if isinstance(layout, Refusal) or isinstance(result, Refusal):
        return result  # type: ignore[return-value]
    target = layout.shape(shape_of(base))
    places = tuple(layout.result_dim(d) for d in spec)
    need = broadcast_source(shape_of(values), target, places)
    if isinstance(need, Refusal):
        return need
    if not all(_only(node, n) for n in node.all_input_nodes):
        return Refusal(f"{node.target} uses a value twice")
    return {**dict.fromkeys(_indices(node), WHOLE), base: spec, values: need}


# ---- embedding ----------------------------------------------------------------------------------
def embedding_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    return (
        spec if operand is node.args[1] else Refusal("the embedding table is looked up by tokens")
    )


def embedding_backward(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    if len(shape_of(node)) - 1 in spec:
        return Refusal("tokens along the embedding's features")
    return {weight: WHOLE, ids: spec}
