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

import torch
from torch import fx

from mstpass.graph.grouped_products import grouped_sums
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import shape_of
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


def matmul_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    bias, left, right = bias_and_factors(node)
    rank = len(shape_of(node))
    if left is right:
        return Refusal("multiplies a matrix by itself")
    if operand is bias:
        return pointwise_forward(node, operand, spec)
    if len(spec) != 1:
        return Refusal("a matmul has tokens in several dims")
    (dim,) = spec
    contracted = rank - 1 if operand is left else rank - 2
    if dim != contracted:
        return spec
    if bias is not None:
        return Refusal(f"{node.target} sums over the tokens and adds a bias")
    return SUM


def matmul_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    bias, left, right = bias_and_factors(node)
    rank = len(shape_of(node))
    if left is right or len(spec) > 1:
        return Refusal("a matmul has tokens in several dims")
    if not spec:
        return dict.fromkeys(node.all_input_nodes, WHOLE)
    (dim,) = spec
    if dim < rank - 2:  # a batch of matrices, one for each token
        needs = {left: spec, right: spec}
    else:
        needs = {left: spec, right: WHOLE} if dim == rank - 2 else {left: WHOLE, right: spec}
    if bias is not None:
        source = broadcast_source(shape_of(bias), shape_of(node), spec)
        if isinstance(source, Refusal):
            return source
        if needs.get(bias, source) != source:
            return Refusal("uses one value as bias and as factor")
        needs[bias] = source
    return needs


def contracted_specs(node: fx.Node) -> OperandSpecs:
    """The specs of the two matrices if the product contracts the tokens."""
    _, left, right = bias_and_factors(node)
    rank = len(shape_of(node))
    return {left: (rank - 1,), right: (rank - 2,)}


# ---- rows grouped by expert ---------------------------------------------------------------------
_EXPERTS = Refusal("each chunk needs the weights of all experts")


def _spec_of_result(node: fx.Node) -> dict[tuple[fx.Node, Spec], Spec | Reduced]:
    """The spec of the result, by an operand and its spec."""
    left, right, positions = node.args[:3]
    assert all(isinstance(n, fx.Node) for n in (left, right, positions)), "all are nodes"
    found: dict[tuple[object, Spec], Spec | Reduced]
    if node.target is grouped_sums:
        found = {(left, (0,)): (1,), (left, (1,)): SUM, (right, (0,)): SUM, (right, (1,)): (2,)}
        return {**found, (positions, (0,)): SUM}  # type: ignore[dict-item]
    found = {(left, (0,)): (0,), (left, (1,)): SUM, (right, (1,)): SUM, (right, (2,)): (1,)}
    return {**found, (positions, (0,)): (0,)}  # type: ignore[dict-item]


def grouped_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    return _spec_of_result(node).get((operand, spec), _EXPERTS)


def grouped_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    needs: OperandSpecs = dict.fromkeys(node.all_input_nodes, WHOLE)
    found = {n: s for (n, s), result in _spec_of_result(node).items() if result == spec}
    return {**needs, **found} if found or not spec else _EXPERTS


def summed_specs(node: fx.Node) -> OperandSpecs:
    """The specs of the operands of a sum over what the op contracts: the rows, or features."""
    left, right, positions, ends = node.args[:4]
    if node.target is grouped_sums:
        return {left: (1,), right: (0,), positions: (0,), ends: WHOLE}  # type: ignore[dict-item]
    return {left: (1,), right: (1,), positions: WHOLE, ends: WHOLE}  # type: ignore[dict-item]


# ---- float8 -------------------------------------------------------------------------------------
_ROWS, _COLUMNS = (0,), (1,)
_BLOCKS = "float8 scales of blocks: their layout does not follow the rows"
_CONTRACTED = "sums float8 products over the tokens, with scales that all tokens decide"


def scaled_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    left, right, of_left, of_right = node.args[:4]
    if not _by_row_or_tensor(node):
        return Refusal(_BLOCKS)
    if operand in (left, of_left) and spec == _ROWS:
        return _ROWS
    if operand in (right, of_right) and spec == _COLUMNS:
        return _COLUMNS
    return Refusal(_CONTRACTED)


def scaled_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    needs: OperandSpecs = dict.fromkeys(node.all_input_nodes, WHOLE)
    if not spec:
        return needs
    if len(spec) > 1:
        return Refusal("a matmul has tokens in several dims")
    if not _by_row_or_tensor(node):
        return Refusal(_BLOCKS)
    matrix, scale = (node.args[0], node.args[2]) if spec == _ROWS else (node.args[1], node.args[3])
    assert isinstance(matrix, fx.Node) and isinstance(scale, fx.Node), "both are nodes"
    needs[matrix] = spec
    if math.prod(shape_of(scale)) != 1:
        needs[scale] = spec
    return needs


def _by_row_or_tensor(node: fx.Node) -> bool:
    """Whether each scale is one element, or one for each row of the left or column of the right."""
    rows, columns = shape_of(node)
    shapes = [tuple(shape_of(s)) for s in node.args[2:4] if isinstance(s, fx.Node)]
    expected = ((rows, 1), (1, columns))
    return all(
        math.prod(shape) == 1 or shape == rowwise
        for shape, rowwise in zip(shapes, expected, strict=True)
    )
