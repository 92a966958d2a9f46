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

from mstpass.graph.advice import ROWWISE, Reason
from mstpass.graph.grouped_products import grouped_sums
from mstpass.graph.token_rules import Place, Places, Rule
from mstpass.graph.token_rules.arguments import nodes_at, shape_of
from mstpass.graph.token_rules.views import aligned
from mstpass.graph.tokens import Refusal

aten = torch.ops.aten

BIASED = frozenset({aten.addmm.default, aten.baddbmm.default})


def bias_and_factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    """The bias (None without one), the left and the right matrix."""
    nodes = node.args[:3] if node.target in BIASED else (None, *node.args[:2])
    bias, left, right = nodes
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node), "the left and right are nodes"
    return (bias if isinstance(bias, fx.Node) else None), left, right


# ---- two matrices, or batches of them -----------------------------------------------------------
def _of_factors(node: fx.Node) -> Places:
    bias, left, right = bias_and_factors(node)
    *batch, rows, columns = range(len(shape_of(node)))
    summed: Place = -1 if bias is None else ROWWISE("{} sums over the tokens and adds a bias")
    of_bias = [] if bias is None else [(bias, aligned(shape_of(bias), shape_of(node)))]
    return [(left, [*batch, rows, summed]), (right, [*batch, summed, columns]), *of_bias]


matmul = Rule(_of_factors)


# ---- rows grouped by expert ---------------------------------------------------------------------
def _of_experts(node: fx.Node) -> Places:
    left, right, positions = nodes_at(node, 0, 1, 2)
    if node.target is grouped_sums:
        return [(left, [1, -1]), (right, [-1, 2]), (positions, [-1])]
    return [(left, [0, -1]), (right, [_experts, -1, 1]), (positions, [0])]


_experts = Reason("each chunk needs the weights of all experts")
grouped = Rule(_of_experts, _experts)


# ---- float8 -------------------------------------------------------------------------------------
def _of_scaled(node: fx.Node) -> Places | Refusal:
    """A scale of the whole matrix has no tokens."""
    if not _by_row_or_tensor(node):
        reason = "float8 scales of blocks: their layout does not follow the rows"
        return Refusal(ROWWISE(reason))
    left, right, *scales = nodes_at(node, 0, 1, 2, 3)
    summed = ROWWISE("sums float8 products over the tokens, with scales that all tokens decide")
    of_scales = [
        (n, [d if size != 1 else summed for d, size in enumerate(shape_of(n))]) for n in scales
    ]
    return [(left, [0, summed]), (right, [summed, 1]), *of_scales]


scaled = Rule(_of_scaled)


def _by_row_or_tensor(node: fx.Node) -> bool:
    """Whether each scale is one element, or one for each row of the left or column of the right."""
    rows, columns = shape_of(node)
    shapes = [tuple(shape_of(s)) for s in node.args[2:4] if isinstance(s, fx.Node)]
    expected = ((rows, 1), (1, columns))
    return all(
        math.prod(shape) == 1 or shape == rowwise
        for shape, rowwise in zip(shapes, expected, strict=True)
    )
