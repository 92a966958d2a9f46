"""Where attention is in a graph: the results from which regions of heads grow.

Either one of the fused ops, or attention written out in products::

    scores = q @ k.transpose()          [B * heads, N, M]
    weights = softmax(scores)           and masks, caps, sinks, casts in front of it or behind
    result = weights @ v                [B * heads, N, d]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import heads_dim, is_attention
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import JointGraph, tensors_of, value_of

aten = torch.ops.aten


class Seed(NamedTuple):
    """A value with heads: where it holds them, and their number."""

    node: fx.Node
    held: HeadDim
    num_heads: int


def attention_seeds(joint: JointGraph) -> list[Seed]:
    """The results of attention in the forward, in the graph's order."""
    found = []
    for node in joint.nodes:
        if node in joint.backward:
            continue
        held: tuple[fx.Node, int] | None = None
        if is_attention(node):
            held = node, heads_dim(node)
        elif node.target is aten.bmm.default and _reads_scores(node):
            held = _with_heads_apart(node)
        if held is not None:
            count = next(tensors_of(held[0].meta["val"])).shape[held[1]]
            if isinstance(count, int) and count > 1:
                found.append(Seed(held[0], HeadDim(held[1]), count))
    return found


def _reads_scores(product: fx.Node) -> bool:
    """Whether the left matrix is computed from another product, row by row."""
    stack = [ops.matmul_factors(product)[0]]
    seen = set(stack)
    exponential = False
    while stack:
        node = stack.pop()
        if ops.is_batched_matmul(node):
            return exponential
        exponential |= node.target in (aten.exp.default, aten._softmax.default)
        if _works_row_by_row(node):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            stack.extend(new)
    return False


def _works_row_by_row(node: fx.Node) -> bool:
    return ops.row(node).kind in ("view", "pointwise", "index")


def _with_heads_apart(product: fx.Node) -> tuple[fx.Node, int] | None:
    """The result as ``[B, heads, N, d]`` or ``[heads, N, d]``, and the dim of its heads."""
    for reader in product.users:
        value = value_of(reader)
        if ops.is_cheap_view(reader) and value is not None and value.dim() == 4:
            return reader, 1
    return product, 0
