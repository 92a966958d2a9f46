"""Token rules of mm, addmm, bmm and baddbmm: ``[N, K] @ [K, M]``, with a batch of matrices or not.

Tokens may run along the rows of the left matrix, along the columns of the right one, over the batch
(one pair of matrices per token), or along the contracted dim: then every chunk of tokens gives a
summand of the result, as in the gradient of a weight.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.token_rules.pointwise import pointwise_forward
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
