"""Heads of attention: how a dim that runs over heads passes through each op.

Terms:
    *head-parallel*: an op is head-parallel if each head of its result depends on the same head of
        its operands, and on no other head.
    *HeadDim*: where a value holds its heads. ``HeadDim(dim, inner)``: along ``dim`` each of the G
        heads has ``inner`` elements in a row. ``[B, N, G * d]`` has ``HeadDim(2, d)``, and after a
        view ``[B, N, G, d]`` it has ``HeadDim(2, 1)``. A dim may hold several rounds of heads:
        ``[B * G, N, d]`` has ``HeadDim(0, 1)``. ``WHOLE`` marks a value without heads, such as the
        input of the projections: every group of heads reads it in full.
    *G*: the number of heads that a loop can tell apart. Of grouped queries, G is the number of
        key-value heads, and a head of the queries counts as a part of its group. If there is a
        single key-value head, every group of query heads reads it whole, and its gradients are
        sums over the groups.

A head is to a group of heads what a token is to a chunk of tokens: along one dim a value is cut
into parts that are computed apart. So the rules are the token rules (token_rules/), applied to one
dim, but for two kinds of ops:

- views may split and merge the dim, as long as the heads stay apart (``through_view``)
- attention is no barrier: the products and the softmax of a head are its own

A value may also be a *sum* over heads (``SUM``): the output projection contracts them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from mstpass.graph import flex_attention, intervals, ops
from mstpass.graph.joint import value_of
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, shape_of, tensor_inputs
from mstpass.graph.tokens import SUM, WHOLE, Reduced, Refusal, group_of
from mstpass.torch_internals.graphs import OpOverload, schema_of


class HeadDim(NamedTuple):
    """The dim along which a value holds its heads, and the elements of one head in a row there."""

    dim: int
    inner: int = 1


MIXED = "a view mixes heads with other dims"
DROPOUT = "dropout in attention: a group of heads cannot draw only its own random numbers"
STATE = "the state of attention's random generator has no heads"
FEW_KEYS = "attention's key-value heads do not divide into the groups"
OTHER_SCORES = "FlexAttention's scores or masks depend on the head"
BUFFERS = "FlexAttention returns gradients of what its scores are changed by"

_WITH_HEADS = frozenset(  # arguments [B, heads, ...] of attention ops
    ("query", "key", "value", "attn_bias", "attn_mask", "out", "logsumexp", "grad_out", "grad_out_")
)
_ROW_SUMS, _HEADS_OF_ROW_SUMS = "logsumexp", 1  # [B, heads, N], of all ops


# ---- attention -----------------------------------------------------------------------------------
def is_attention(node: fx.Node) -> bool:
    """Whether the node is one of the fused attention ops, forward or backward."""
    return ops.attention_of(node) is not None


def heads_dim(node: fx.Node) -> int:
    """The dim of heads of the queries, keys, values and results of a fused attention op."""
    attention = ops.attention_of(node)
    assert attention is not None, "the attention is known"
    return attention.heads_dim


def is_product(node: fx.Node) -> bool:
    """Whether the node is a matmul or attention: it reads its operands from memory."""
    return ops.is_matmul(node) or is_attention(node)


def is_attention_item(node: fx.Node) -> bool:
    """Whether the node is one of the results of a fused attention op."""
    return node.target is operator.getitem and is_attention(node.all_input_nodes[0])


def forward_of(node: fx.Node) -> fx.Node:
    """The fused attention op to which a node belongs, of which it may be the backward."""
    attention = ops.attention_of(node)
    if attention is None or not attention.backward:
        return node
    result = node.args[flex_attention.OUTPUT] if attention.flex else argument(node, "out")
    assert isinstance(result, fx.Node), "the result is a node"
    return result.all_input_nodes[0]


def result_has_heads(node: fx.Node, position: int) -> bool:
    """Whether a result of the node holds heads, and not the state of a generator."""
    attention = ops.attention_of(node)
    return attention is None or position < attention.results


def _item_source(item: fx.Node, num_heads: int) -> OperandSpecs | Refusal:
    """Where an attention op whose result has this item holds its heads."""
    (source,) = item.all_input_nodes
    if not result_has_heads(source, item.args[1]):  # type: ignore[arg-type]
        return Refusal(STATE)
    dim = heads_dim(source)
    return {source: HeadDim(dim, shape_of(source)[dim] // num_heads)}


def result_dim(node: fx.Node, position: int, dim: int) -> int:
    """The dim of heads of one result of a node whose first result has them in ``dim``."""
    attention = ops.attention_of(node)
    is_row_sums = position == 1 and attention is not None and not attention.backward
    return _HEADS_OF_ROW_SUMS if is_row_sums else dim


def _attention_heads(node: fx.Node, num_heads: int) -> OperandSpecs | Refusal:
    """Where the operands of an attention op must hold their heads."""
    if flex_attention.is_flex(node):
        return _flex_heads(node, num_heads)
    if argument(node, "dropout_p") != 0:
        return Refusal(DROPOUT)
    assert isinstance(node.target, OpOverload), "the target is an op"
    needs: OperandSpecs = dict.fromkeys(tensor_inputs(node), WHOLE)
    for known in schema_of(node.target).arguments:
        operand = argument(node, known.name)
        if known.name not in _WITH_HEADS or not isinstance(operand, fx.Node):
            continue
        shape = shape_of(operand)
        is_mask = known.name in ("attn_bias", "attn_mask")
        if is_mask and (len(shape) < 3 or shape[-3] == 1):
            continue
        dim = len(shape) - 3 if is_mask else heads_dim(node)
        dim = _HEADS_OF_ROW_SUMS if known.name == _ROW_SUMS else dim
        if shape[dim] == 1:  # the key-value head of all queries
            continue
        if shape[dim] % num_heads:
            return Refusal(FEW_KEYS)
        needs[operand] = HeadDim(dim, shape[dim] // num_heads)
    return needs


def _flex_heads(node: fx.Node, num_heads: int) -> OperandSpecs | Refusal:
    if flex_attention.depends_on_head(node):
        return Refusal(OTHER_SCORES)
    if flex_attention.gradients_of_buffers(node):
        return Refusal(BUFFERS)
    needs: OperandSpecs = dict.fromkeys(tensor_inputs(node), WHOLE)
    masks, dim = flex_attention.masks_by_head(node), heads_dim(node)
    for operand in (*flex_attention.operands_with_heads(node), *masks):
        heads = shape_of(operand)[dim]
        if heads == 1:
            continue
        if heads % num_heads:
            return Refusal(FEW_KEYS)
        needs[operand] = HeadDim(dim, heads // num_heads)
    return needs


def _attention_result(
    node: fx.Node, operand: fx.Node, held: HeadDim, num_heads: int
) -> HeadDim | Refusal:
    needs = _attention_heads(node, num_heads)
    if isinstance(needs, Refusal):
        return needs
    if needs[operand] != held:
        return Refusal("attention needs its heads in another dim")
    dim = heads_dim(node)
    return HeadDim(dim, shape_of(node)[dim] // num_heads)


# ---- rules ---------------------------------------------------------------------------------------
def result_heads(
    node: fx.Node, operand: fx.Node, held: HeadDim, num_heads: int
) -> HeadDim | Reduced | Refusal:
    """Where the node's result holds its heads if one of its operands holds them in ``held``."""
    if is_attention(node):
        return _attention_result(node, operand, held, num_heads)
    if is_attention_item(node):
        if not result_has_heads(operand, node.args[1]):  # type: ignore[arg-type]
            return Refusal(STATE)
        dim = result_dim(operand, node.args[1], heads_dim(operand))  # type: ignore[arg-type]
        size = shape_of(node)[dim]
        return SUM if size == 1 else HeadDim(dim, size // num_heads)
    row = ops.lookup(node)
    if isinstance(row, Refusal):
        return _in_terms_of_heads(row)
    if ops.is_reshape(node):
        return through_view(shape_of(operand), shape_of(node), held, num_heads)
    if intervals.works_along(node, held.dim):
        needs = intervals.operand_specs(node, held, num_heads)
        return needs if isinstance(needs, Refusal) else held
    result = ops.result_spec(node, operand, (held.dim,))
    if isinstance(result, Reduced):
        return result
    if isinstance(result, Refusal):
        return _in_terms_of_heads(result)
    if len(result) != 1:
        return Refusal(f"{node.target} has no dim of heads")
    return HeadDim(result[0], held.inner)


def operand_heads(node: fx.Node, held: HeadDim, num_heads: int) -> OperandSpecs | Refusal:
    """Where the operands must hold their heads for the node's result to hold them in ``held``."""
    if is_attention(node):
        return _attention_heads(node, num_heads)
    if is_attention_item(node):
        return _item_source(node, num_heads)
    row = ops.lookup(node)
    if isinstance(row, Refusal):
        return _in_terms_of_heads(row)
    if ops.is_reshape(node):
        source = node.all_input_nodes[0]
        result = through_view(shape_of(node), shape_of(source), held, num_heads)
        return result if isinstance(result, Refusal) else {source: result}
    if intervals.works_along(node, held.dim):
        return intervals.operand_specs(node, held, num_heads)
    needs = ops.operand_specs(node, (held.dim,))
    if isinstance(needs, Refusal):
        return _in_terms_of_heads(needs)
    size = shape_of(node)[held.dim]
    found: OperandSpecs = {}
    for operand, spec in needs.items():
        if spec and shape_of(operand)[spec[0]] != size:
            return Refusal(f"{operand.name} has other sizes along the heads")
        found[operand] = HeadDim(spec[0], held.inner) if spec else WHOLE
    return found


def summed_heads(node: fx.Node, operand: fx.Node, held: HeadDim) -> OperandSpecs:
    """Where the operands hold their heads of a node that sums over the heads of ``operand``."""
    if is_attention_item(node):
        return {operand: held}
    needs = ops.sum_operands(node, operand, (held.dim,))
    return {n: HeadDim(spec[0], held.inner) if spec else WHOLE for n, spec in needs.items()}


def is_sum_of_sums(node: fx.Node, sums: set[fx.Node]) -> bool:
    """Whether a node adds sums over heads, or only views or casts one.

    Such a node can be applied to the parts of each group of heads, and the results added up.
    """
    read = set(tensor_inputs(node))
    if value_of(node) is None or not read <= sums:
        return False
    narrows = any(value_of(node).itemsize < value_of(n).itemsize for n in read)  # type: ignore[union-attr]
    return not narrows and ops.row(node).is_linear(node, read)


def _in_terms_of_heads(refusal: Refusal) -> Refusal:
    """The reason of a token rule, which was asked about heads."""
    reason = refusal.reason
    for token, head in (("token-parallel", "head-parallel"), ("token dim", "dim of heads")):
        reason = reason.replace(token, head)
    if reason.startswith("no token rule"):
        return refusal
    return Refusal(reason.replace("tokens", "heads").replace("a token", "a head"))


# ---- layouts -------------------------------------------------------------------------------------
def through_view(
    in_shape: Sequence[int], out_shape: Sequence[int], held: HeadDim, num_heads: int
) -> HeadDim | Refusal:
    """Where a value holds its heads after a view.

    In the smallest group of dims that holds the heads, in row-major order, the elements are
    ``[rounds, G, inner]``. The result has a dim of heads if one of its dims holds all of G::

        [N, G * d] -> [N, G, d]         (1, d) -> (1, 1)
        [B, G, r, N, d] -> [B, G * r, N, d]     (1, 1) -> (1, r)
    """
    ins, outs = group_of(in_shape, out_shape, held.dim)
    if not outs:
        return Refusal(MIXED)
    inner = held.inner * math.prod(in_shape[d] for d in ins if d > held.dim)
    after = 1
    for dim in reversed(outs):
        if inner % after == 0 and out_shape[dim] % (num_heads * (inner // after)) == 0:
            return HeadDim(dim, inner // after)
        after *= out_shape[dim]
    return Refusal(MIXED)
