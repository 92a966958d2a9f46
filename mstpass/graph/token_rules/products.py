"""Token rules of matrix products: of two matrices, of rows grouped by expert, of float8 matrices.

mm, addmm, bmm and baddbmm: ``[N, K] @ [K, M]``, with a batch of matrices or not.

Tokens may run along the rows of the left matrix, along the columns of the right one, over the batch
(one pair of matrices per token), or along the contracted dim: then every chunk of tokens gives a
summand of the result, as in the gradient of a weight.

Rows that are grouped by expert (graph/grouped_products.py)::

    grouped_rows    rows [R, k], weights [E, k, n]    ->  [R, n]
    grouped_sums    left [k, R], right [R, n]         ->  [E, k, n]

A loop runs over the rows R, or over features, k or n, of all experts. Each row brings its number
along, by which a chunk knows where its experts end; the ends of the experts are whole. What is
contracted, the rows in the gradient of the weights, or k, is one summand for each chunk.

``_scaled_mm`` multiplies float8 matrices, each with scales::

    result = (left * scale_left) @ (right * scale_right)

Scales by row have the shapes ``[M, 1]`` and ``[1, N]``, those of a whole matrix one element. So a
chunk of rows is the product of the chunk, its scales, and the other matrix whole. Where one scale
is that of all tokens, it is computed from all of them before: then the region ends there.

Source: torch/_meta_registrations.py (``meta_scaled_mm``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from mstpass.graph.grouped_products import grouped_rows, grouped_sums
from mstpass.graph.token_rules import BackwardRule, ForwardRule, OperandSpecs
from mstpass.graph.token_rules.arguments import nodes_at, shape_of
from mstpass.graph.token_rules.views import pointwise_forward
from mstpass.graph.tokens import SUM, WHOLE, Reduced, Refusal, Spec, broadcast_source

aten = torch.ops.aten

BIASED = frozenset({aten.addmm.default, aten.baddbmm.default})


def bias_and_factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    """The bias (None without one), the left and the right matrix."""
    nodes = node.args[:3] if node.target in BIASED else (None, *node.args[:2])
    bias, left, right = nodes
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node), "the left and right are nodes"
    return (bias if isinstance(bias, fx.Node) else None), left, right


# Of each operand and its spec, the spec of the result. Those with the same result belong together.
_Table = dict[tuple[fx.Node, Spec], Spec | Reduced]
_SEVERAL = Refusal("a matmul has tokens in several dims")
_EXPERTS = Refusal("each chunk needs the weights of all experts")
_BLOCKS = Refusal("float8 scales of blocks: their layout does not follow the rows")
_CONTRACTED = Refusal("sums float8 products over the tokens, with scales that all tokens decide")


def _rules(
    table: Callable[[fx.Node], _Table | Refusal], of_operand: Refusal, of_result: Refusal
) -> tuple[ForwardRule, BackwardRule]:
    """Both rules of a product, with the reasons why an operand's spec, or a result's, has none."""

    def forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        known = table(node)
        return known if isinstance(known, Refusal) else known.get((operand, spec), of_operand)

    def backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        known = table(node)
        if isinstance(known, Refusal):
            return known
        needs = _needed_for(node, known, spec)
        return needs if not spec or any(needs.values()) else of_result

    return forward, backward


def _needed_for(node: fx.Node, table: _Table, result: Spec | Reduced) -> OperandSpecs:
    found = {n: spec for (n, spec), of_result in table.items() if of_result == result}
    return {**dict.fromkeys(node.all_input_nodes, WHOLE), **found}


# ---- two matrices, or batches of them -----------------------------------------------------------
def _of_factors(node: fx.Node) -> _Table | Refusal:
    _, left, right = bias_and_factors(node)
    *batch, rows, columns = range(len(shape_of(node)))
    if left is right:
        return Refusal("multiplies a matrix by itself")
    of_batch: _Table = {(n, (dim,)): (dim,) for n in (left, right) for dim in batch}
    of_result: _Table = {(left, (rows,)): (rows,), (right, (columns,)): (columns,)}
    return {**of_batch, **of_result, (left, (columns,)): SUM, (right, (rows,)): SUM}


_forward, _backward = _rules(_of_factors, _SEVERAL, _SEVERAL)


def matmul_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    bias, *_ = bias_and_factors(node)
    if operand is bias:
        return pointwise_forward(node, operand, spec)
    result = _forward(node, operand, spec)
    if bias is not None and result == SUM:
        return Refusal(f"{node.target} sums over the tokens and adds a bias")
    return result


def matmul_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    bias, *factors = bias_and_factors(node)
    needs = _backward(node, spec)
    if isinstance(needs, Refusal) or bias is None:
        return needs
    source = broadcast_source(shape_of(bias), shape_of(node), spec)
    if isinstance(source, Refusal):
        return source
    if bias in factors and needs[bias] != source:
        return Refusal("uses one value as bias and as factor")
    return {**needs, bias: source}


def contracted_specs(node: fx.Node) -> OperandSpecs:
    """The specs of the operands if the product contracts the tokens."""
    by_expert = node.target in (grouped_rows, grouped_sums)
    table = _of_experts(node) if by_expert else _of_factors(node)
    assert not isinstance(table, Refusal), "the product has rules"
    return _needed_for(node, table, SUM)


# ---- rows grouped by expert ---------------------------------------------------------------------
def _of_experts(node: fx.Node) -> _Table:
    left, right, positions = nodes_at(node, 0, 1, 2)
    if node.target is grouped_sums:
        of_rows: _Table = {(left, (1,)): SUM, (right, (0,)): SUM, (positions, (0,)): SUM}
        return {**of_rows, (left, (0,)): (1,), (right, (1,)): (2,)}
    of_rows = {(left, (0,)): (0,), (positions, (0,)): (0,)}
    return {**of_rows, (left, (1,)): SUM, (right, (1,)): SUM, (right, (2,)): (1,)}


grouped = _rules(_of_experts, _EXPERTS, _EXPERTS)


# ---- float8 -------------------------------------------------------------------------------------
def _of_scaled(node: fx.Node) -> _Table | Refusal:
    """A scale of the whole matrix has no tokens."""
    if not _by_row_or_tensor(node):
        return _BLOCKS
    left, right, *scales = nodes_at(node, 0, 1, 2, 3)
    table: _Table = {(left, (0,)): (0,), (right, (1,)): (1,)}
    by_row = [(n, (dim,)) for dim, n in enumerate(scales) if math.prod(shape_of(n)) != 1]
    return {**table, **{(n, spec): spec for n, spec in by_row}}


scaled = _rules(_of_scaled, _CONTRACTED, _SEVERAL)


def _by_row_or_tensor(node: fx.Node) -> bool:
    """Whether each scale is one element, or one for each row of the left or column of the right."""
    rows, columns = shape_of(node)
    shapes = [tuple(shape_of(s)) for s in node.args[2:4] if isinstance(s, fx.Node)]
    expected = ((rows, 1), (1, columns))
    return all(
        math.prod(shape) == 1 or shape == rowwise
        for shape, rowwise in zip(shapes, expected, strict=True)
    )
