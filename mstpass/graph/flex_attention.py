"""FlexAttention in a graph: higher-order ops whose scores and masks are subgraphs.

    out, logsumexp, max_scores = flex_attention(q, k, v, score_mod, block_mask, scale, options,
                                                score_mod_buffers, mask_mod_buffers)
    dq, dk, dv, d_buffers = flex_attention_backward(q, k, v, out, logsumexp, d_out, d_logsumexp,
                                                    score_mod, joint_score_mod, block_mask, ...)

``block_mask`` has lengths, tensors ``[B, heads or 1, ...]`` and, last, the mask as a subgraph. The
subgraphs are called with the score (but for masks), the batch, the head, the row and the column.
Both ops draw no random numbers and write to nothing but their results, so they may run twice.
Source: torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.op_rows.row import FlexArguments
from mstpass.graph.token_rules.arguments import shape_of

OUTPUT = 3  # the position of the output among the arguments of the backward
# The position of the head among the inputs of a subgraph.
_HEAD_OF_SCORE, _HEAD_OF_MASK = 2, 1


def is_flex(node: fx.Node) -> bool:
    """Whether the node is a FlexAttention, forward or backward."""
    attention = ops.attention_of(node)
    return attention is not None and attention.flex is not None


def is_flex_subgraph(node: fx.Node) -> bool:
    """Whether the node is a subgraph that FlexAttention alone calls."""
    return node.op == "get_attr" and all(map(is_flex, node.users))


def _positions(node: fx.Node) -> FlexArguments:
    """Where a FlexAttention has its arguments."""
    attention = ops.attention_of(node)
    assert attention is not None and attention.flex is not None, "the op is FlexAttention"
    return attention.flex


def operands_with_heads(node: fx.Node) -> list[fx.Node]:
    """The operands ``[B, heads, ...]`` of a call, but for the tensors of its block mask."""
    operands = node.args[: _positions(node).operands]
    return [operand for operand in operands if isinstance(operand, fx.Node)]


def masks_by_head(node: fx.Node) -> list[fx.Node]:
    """The tensors ``[B, heads, ...]`` of a call's block mask; most have 1 in place of the heads."""
    mask: Any = node.args[_positions(node).mask]
    tensors = [n for n in mask if isinstance(n, fx.Node) and value_of(n) is not None]
    return [n for n in tensors if len(shape_of(n)) > 2 and shape_of(n)[1] > 1]


def depends_on_head(node: fx.Node) -> bool:
    """Whether a call's scores or masks are other ones for other heads."""
    at = _positions(node)
    mask: Any = node.args[at.mask]
    scores = [(node.args[position], _HEAD_OF_SCORE) for position in at.scores]
    return any(
        _reads_input(graph, number) for graph, number in (*scores, (mask[-1], _HEAD_OF_MASK))
    )


def gradients_of_buffers(node: fx.Node) -> bool:
    """Whether a call returns gradients of what its scores are changed by."""
    attention = ops.attention_of(node)
    is_backward = attention is not None and attention.backward
    return is_backward and any(True for _ in tensors_of(node.meta["val"][3]))


def _reads_input(subgraph: Any, number: int) -> bool:
    """Whether a subgraph reads its input of this number; one that is not in the graph may."""
    if not isinstance(subgraph, fx.Node):
        return True
    module: Any = getattr(subgraph.graph.owning_module, str(subgraph.target))
    inputs = module.graph.find_nodes(op="placeholder")
    return bool(inputs[number].users)
