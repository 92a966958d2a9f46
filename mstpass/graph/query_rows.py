"""Rows of queries: attention in parts, each of some queries that attend to all keys.

Of an attention with queries (B, H, S, D), keys (B, H, T, D), values (B, H, T, E) and a mask
(B or 1, H or 1, S, T), a row is one of the S queries, of all sequences and heads::

    by row        queries, the mask, the result and the logarithms of its sums, and the gradients of
                  the result and of the queries
    whole         keys and values
    summed        the gradients of keys and values, over all rows

So a loop over rows needs the mask's rows of one chunk alone, and can compute them. Kernels pad the
logarithms to whole blocks of 32 rows, so S is a multiple of 32 where they do.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.heads import DROPOUT, is_attention_item
from mstpass.graph.joint import tensors_of
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, has_argument, tensor_inputs
from mstpass.graph.tokens import WHOLE, Refusal, Spec

ROWS = 2  # the dim of rows, of all values but masks: there it is the last but one
_SPEC = (ROWS,)
_MASKS = ("attn_bias", "attn_mask")
_BY_ROW = ("query", "out", "logsumexp", "grad_out", "grad_out_")
_RESULTS_BY_ROW = {False: 2, True: 1}  # forward: result and logarithms; backward: of queries
_SUMMED_RESULTS = (1, 2)  # of the backward: the gradients of keys and values
OTHER_RESULT = "attention returns its mask's gradient, or another result that is not by row"


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of a fused attention that can run in rows; None of other nodes."""
    attention = ops.attention_of(node)
    if attention is None or not attention.by_row:
        return None
    name = next((name for name in _MASKS if has_argument(node, name)), None)
    mask = argument(node, name) if name else None
    return mask if isinstance(mask, fx.Node) else None


def is_backward(node: fx.Node) -> bool:
    """Whether the node is the backward of an attention."""
    attention = ops.attention_of(node)
    return attention is not None and attention.backward


def result_by_row(node: fx.Node, position: int) -> bool:
    """Whether a result of the attention has a row for each query."""
    return position < _RESULTS_BY_ROW[is_backward(node)]


def is_summed(item: fx.Node) -> bool:
    """Whether the item is the gradient of keys or of values."""
    source = item.all_input_nodes[0]
    return is_attention_item(item) and is_backward(source) and item.args[1] in _SUMMED_RESULTS


def operand_rows(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """Where the operands of an attention, or of one of its items, hold their rows."""
    if spec != _SPEC:
        return Refusal("attention needs its rows in another dim")
    if is_attention_item(node):
        (source,) = node.all_input_nodes
        return {source: spec} if result_by_row(source, node.args[1]) else Refusal(OTHER_RESULT)  # type: ignore[arg-type]
    if argument(node, "dropout_p") != 0:
        return Refusal(DROPOUT)
    needs: OperandSpecs = dict.fromkeys(tensor_inputs(node), WHOLE)
    for name in _BY_ROW:
        operand = argument(node, name) if has_argument(node, name) else None
        if isinstance(operand, fx.Node):
            needs[operand] = spec
    mask = mask_of(node)
    if mask is not None:
        shape = next(tensors_of(mask.meta["val"])).shape
        needs[mask] = (len(shape) - 2,) if len(shape) > 1 and shape[-2] != 1 else WHOLE
    return needs
