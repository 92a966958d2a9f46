"""Rows of queries: attention in parts, each of some queries that attend to all keys.

Of an attention with queries (B, H, S, D), keys (B, H, T, D), values (B, H, T, E) and a mask
(B or 1, H or 1, S, T), a row is one of the S queries, of all sequences and heads::

    by row        queries, the mask, the result and the logarithms of its sums, and the gradients of
                  the result and of the queries
    whole         keys and values
    summed        the gradients of keys and values, over all rows

So a loop over rows needs the mask's rows of one chunk alone, and can compute them. Kernels pad the
logarithms to whole blocks of 32 rows, so S is a multiple of 32 where they do.

Attention without a mask is called as the op of graph/attention_rows.py, which is told the number of
the first row, so that causal attention computes no more than the whole does. Its rows are those of
all sequences, one after the other: the tokens of a batch. The gradients of keys and values are
complete after all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.heads import DROPOUT, is_attention_item
from mstpass.graph.joint import numel, tensors_of
from mstpass.graph.sizes import generic_shape, same_shape
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, has_argument, tensor_inputs
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.torch_internals.attention_blocks import is_fused

ROWS = 2  # the dim of rows, of all values but masks: there it is the last but one
_SPEC = (ROWS,)
_MASKS = ("attn_bias", "attn_mask")
_BY_ROW = ("query", "out", "logsumexp", "grad_out", "grad_out_")
_KEYS = ("key", "value")
_RESULTS_BY_ROW = {False: 2, True: 1}  # forward: result and logarithms; backward: of queries
_SUMMED_RESULTS = (1, 2)  # of the backward: the gradients of keys and values
OTHER_RESULT = "attention returns its mask's gradient, or another result that is not by row"
OTHER_ROWS = "attention needs its rows in another dim"
OTHER_KERNEL = "no attention of a chunk of queries gives what this kernel does"


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


def shares_keys(node: fx.Node) -> bool:
    """Whether the node is an attention in which several queries of a token have the same keys."""
    attention = ops.attention_of(node)
    if attention is None or attention.backward or attention.flex is not None:
        return False
    return 2 * numel(argument(node, "key")) <= numel(argument(node, "query"))


def result_by_row(node: fx.Node, position: int) -> bool:
    """Whether a result of the attention has a row for each query."""
    return position < _RESULTS_BY_ROW[is_backward(node)]


def is_summed(item: fx.Node) -> bool:
    """Whether the item is the gradient of keys or of values."""
    source = item.all_input_nodes[0]
    return is_attention_item(item) and is_backward(source) and item.args[1] in _SUMMED_RESULTS


def operand_rows(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """Where the operands of an attention, or of one of its items, hold their rows.

    Args:
        spec: that of the node; of an attention, that of its result or of the queries' gradient.
    """
    if is_attention_item(node):
        (source,) = node.all_input_nodes
        position = node.args[1]
        if not result_by_row(source, position):  # type: ignore[arg-type]
            return Refusal(OTHER_RESULT)
        return {source: spec}
    if argument(node, "dropout_p") != 0:
        return Refusal(DROPOUT)
    mask = mask_of(node)
    if mask is None:
        return _rows_of_own_op(node, spec)
    if spec != _SPEC:
        return Refusal(OTHER_ROWS)
    needs: OperandSpecs = dict.fromkeys(tensor_inputs(node), WHOLE)
    for operand in _operands(node, _BY_ROW):
        needs[operand] = spec
    shape = next(tensors_of(mask.meta["val"])).shape
    needs[mask] = (len(shape) - 2,) if len(shape) > 1 and shape[-2] != 1 else WHOLE
    return needs


def _operands(node: fx.Node, names: tuple[str, ...]) -> list[fx.Node]:
    found = (argument(node, name) for name in names if has_argument(node, name))
    nodes = (operand for operand in found if isinstance(operand, fx.Node))
    return [node for node in nodes if node.meta.get("val") is not None]


# ---- the op of graph/attention_rows.py -----------------------------------------------------------
class RowsCall(NamedTuple):
    """The arguments of an attention, as those of the op for rows.

    Attributes:
        tensors: queries and what else is by row, keys and values, in the order of the op.
        length: queries of a sequence.
        column: the logarithms of sums have a last dim of one.
    """

    tensors: tuple[fx.Node, ...]
    length: Any
    causal: bool
    scale: float
    column: bool


def rows_call(node: fx.Node) -> RowsCall | Refusal:
    """How the op for rows computes an attention without a mask, or why it does not."""
    attention = ops.attention_of(node)
    if attention is None or attention.flex is not None or attention.heads_dim != 1:
        return Refusal(OTHER_KERNEL)
    names = (*(("grad_out",) if attention.backward else ()), "query", "key", "value")
    names += ("out", "logsumexp") if attention.backward else ()
    tensors = _operands(node, names)
    lengths = ("cum_seq_q", "cum_seq_k", "alibi_slopes", "seqused_k", "block_table", *_MASKS)
    if any(_operands(node, (name,)) for name in lengths) or len(tensors) != len(names):
        return Refusal(OTHER_KERNEL)
    of_queries = tensors[int(attention.backward) :][:3]
    query, key, value = (operand.meta["val"] for operand in of_queries)
    log_sums = tensors[-1].meta["val"] if attention.backward else _results(node)[1]
    rows = query.shape[:3]
    column = same_shape(log_sums.shape, (*rows, 1))
    if not is_fused(query, key, value) or not (column or same_shape(log_sums.shape, rows)):
        return Refusal(OTHER_KERNEL)
    causal = bool(argument(node, "is_causal"))
    if causal and not same_shape(query.shape[ROWS:3], key.shape[ROWS:3]):
        return Refusal("causal attention of other tokens than those of the keys")
    scale = argument(node, "scale")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    return RowsCall(tuple(tensors), query.shape[ROWS], causal, scale, column)


def _results(node: fx.Node) -> list[torch.Tensor]:
    return list(tensors_of(node.meta["val"]))


def _rows_of_own_op(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    call = rows_call(node)
    if isinstance(call, Refusal):
        return call
    shape = generic_shape(next(tensors_of(node.meta["val"])))
    if spec != tuple(d for d in (0, ROWS) if shape[d] != 1):
        return Refusal(OTHER_ROWS)
    keys = _operands(node, _KEYS)
    return {n: WHOLE if n in keys else spec for n in call.tensors}
