"""Fused attention: what each of its operands and results holds, and its rows of queries.

Heads: a loop may compute some heads, of the operands that have any (heads.py).

Rows: a loop may compute attention in parts, each of some queries that attend to all keys. Of an
attention with queries (B, H, S, D), keys (B, H, T, D), values (B, H, T, E) and a mask
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

FlexAttention is two higher-order ops, whose scores and masks are subgraphs::

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

import operator
from typing import Any, NamedTuple

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import NO_ATTENTION_DROPOUT, NO_MASK, OWN_LOOPS
from mstpass.graph.joint import numel, tensors_of, value_of
from mstpass.graph.op_rows.row import FlexArguments
from mstpass.graph.sizes import generic_shape, same_shape
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, has_argument, shape_of, tensor_inputs
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.torch_internals.attention_blocks import is_fused

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


def _operands_of_flex(node: fx.Node) -> list[fx.Node]:
    """The operands ``[B, heads, ...]`` of a call, and such tensors of its block mask; most of these
    have 1 in place of the heads."""
    at = _positions(node)
    mask: Any = node.args[at.mask]
    tensors = [n for n in mask if isinstance(n, fx.Node) and value_of(n) is not None]
    by_head = (n for n in tensors if len(shape_of(n)) > 2 and shape_of(n)[1] > 1)
    return [*(n for n in node.args[: at.operands] if isinstance(n, fx.Node)), *by_head]


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
    return is_backward(node) and any(True for _ in tensors_of(node.meta["val"][3]))


def _reads_input(subgraph: Any, number: int) -> bool:
    """Whether a subgraph reads its input of this number; one that is not in the graph may."""
    if not isinstance(subgraph, fx.Node):
        return True
    module: Any = getattr(subgraph.graph.owning_module, str(subgraph.target))
    inputs = module.graph.find_nodes(op="placeholder")
    return bool(inputs[number].users)


# ---- FlexAttention -------------------------------------------------------------------------------
ROWS = 2  # the dim of rows, of all values but masks: there it is the last but one
DROPOUT = NO_ATTENTION_DROPOUT(
    "dropout in attention: a group of heads cannot draw only its own random numbers"
)
OTHER_RESULT = NO_MASK(
    "attention returns its mask's gradient, or another result that is not by row"
)
OTHER_ROWS = NO_MASK("attention needs its rows in another dim")
OTHER_KERNEL = OWN_LOOPS("no attention of a chunk of queries gives what this kernel does")


class Held(NamedTuple):
    """The dims of heads, of rows and of the batch in an operand or a result of attention; None: it
    has none."""

    heads: int | None
    rows: int | None
    is_sum: bool = False  # over the rows
    batch: int | None = 0


_OF_ALL = -1  # the dim of heads that an op has in most values (Attention.heads_dim)
_BY_QUERY, _BY_KEY, _LOG_SUMS = Held(_OF_ALL, ROWS), Held(_OF_ALL, None), Held(1, ROWS)
_MASKS = ("attn_bias", "attn_mask")
_OPERANDS = {  # masks count their dims from the last one
    **dict.fromkeys(("query", "out", "grad_out", "grad_out_"), _BY_QUERY),
    **dict.fromkeys(("key", "value"), _BY_KEY),
    "logsumexp": _LOG_SUMS,
    **dict.fromkeys(_MASKS, Held(-3, -2, batch=-4)),
}
_GRADIENTS = (_BY_QUERY, *[_BY_KEY._replace(is_sum=True)] * 2, _BY_KEY)  # the last: of the mask
_RESULTS = {False: (_BY_QUERY, _LOG_SUMS, _BY_KEY), True: _GRADIENTS}
# These tell it of sequences that are no rows of one batch.
_OTHER_TENSORS = ("cum_seq_q", "cum_seq_k", "alibi_slopes", "seqused_k", "block_table")


# ---- the op --------------------------------------------------------------------------------------
def is_attention(node: fx.Node) -> bool:
    """Whether the node is one of the fused attention ops, forward or backward."""
    return ops.attention_of(node) is not None


def is_backward(node: fx.Node) -> bool:
    """Whether the node is the backward of an attention."""
    attention = ops.attention_of(node)
    return attention is not None and attention.backward


def is_product(node: fx.Node) -> bool:
    """Whether the node is a matmul or attention: it reads its operands from memory."""
    return ops.is_matmul(node) or is_attention(node)


def is_attention_item(node: fx.Node) -> bool:
    """Whether the node is one of the results of a fused attention op."""
    return node.target is operator.getitem and is_attention(node.all_input_nodes[0])


def forward_of(node: fx.Node) -> fx.Node:
    """The fused attention op to which a node belongs, of which it may be the backward."""
    if not is_backward(node):
        return node
    result = node.args[OUTPUT] if is_flex(node) else argument(node, "out")
    assert isinstance(result, fx.Node), "the result is a node"
    return result.all_input_nodes[0]


def backwards_of(attention: fx.Node) -> set[fx.Node]:
    """The fused ops that compute the gradients of an attention of the forward."""
    readers = {user for item in attention.users for user in item.users}
    return {user for user in readers if is_backward(user) and forward_of(user) is attention}


def heads_dim(node: fx.Node) -> int:
    """The dim of heads of the queries, keys, values and results of a fused attention op."""
    attention = ops.attention_of(node)
    assert attention is not None, "the attention is known"
    return attention.heads_dim


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of a fused attention that can run in rows; None of other nodes."""
    attention = ops.attention_of(node)
    if attention is None or not attention.by_row:
        return None
    return next(iter(_tensors(node, _MASKS)), None)


def shares_keys(node: fx.Node) -> bool:
    """Whether the node is an attention in which several queries of a token have the same keys."""
    if not is_attention(node) or is_backward(node) or is_flex(node):
        return False
    return 2 * numel(argument(node, "key")) <= numel(argument(node, "query"))


# ---- operands and results ------------------------------------------------------------------------
def operands_of(node: fx.Node) -> dict[fx.Node, Held]:
    """What each operand of an attention holds; operands that hold neither are left out."""
    if is_flex(node):
        return dict.fromkeys(_operands_of_flex(node), Held(heads_dim(node), None))
    return {
        operand: Held(
            _dim(node, operand, held.heads),
            _dim(node, operand, held.rows),
            batch=_dim(node, operand, held.batch),
        )
        for name, held in _OPERANDS.items()
        for operand in _tensors(node, (name,))
    }


def _dim(node: fx.Node, operand: fx.Node, dim: int | None) -> int | None:
    """A dim of the table, counted from the first one; None where a mask has none, or a single."""
    if dim is None or dim == _OF_ALL:
        return dim if dim is None else heads_dim(node)
    shape = shape_of(operand)
    if dim < 0 and (len(shape) + dim < 0 or shape[dim] == 1):
        return None
    return dim % len(shape)


def held_by_item(item: fx.Node) -> Held | None:
    """What a result of an attention holds, for the item that stands for it; None of the state of a
    generator."""
    attention, position = ops.attention_of(item.all_input_nodes[0]), item.args[1]
    assert isinstance(position, int), "the position is a number"
    if attention is None or position >= attention.results:
        return None
    held = _RESULTS[attention.backward][position]
    return held._replace(heads=attention.heads_dim) if held.heads == _OF_ALL else held


def is_summed(item: fx.Node) -> bool:
    """Whether the item is the gradient of keys or of values."""
    held = held_by_item(item) if is_attention_item(item) else None
    return held is not None and held.is_sum


def _tensors(node: fx.Node, names: tuple[str, ...]) -> list[fx.Node]:
    """Those of the arguments that are given and hold a tensor."""
    found = (argument(node, name) for name in names if has_argument(node, name))
    nodes = (operand for operand in found if isinstance(operand, fx.Node))
    return [node for node in nodes if node.meta.get("val") is not None]


# ---- rows ----------------------------------------------------------------------------------------
def row_dims(node: fx.Node) -> Spec:
    """The dims of an attention's rows in its queries; with a mask, all sequences have the same."""
    shape = generic_shape(next(tensors_of(node.meta["val"])))
    with_mask = mask_of(node) is not None
    return (ROWS,) if with_mask else tuple(d for d in (0, ROWS) if shape[d] != 1)


def operand_rows(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """Where the operands of an attention, or of one of its items, hold their rows.

    Args:
        spec: that of the node; of an attention, that of its result or of the queries' gradient.
    """
    if is_attention_item(node):
        held = held_by_item(node)
        by_row = held is not None and held.rows is not None
        return {node.all_input_nodes[0]: spec} if by_row else Refusal(OTHER_RESULT)
    if is_flex(node):
        return Refusal(OTHER_KERNEL)
    if argument(node, "dropout_p") != 0:
        return Refusal(DROPOUT)
    mask = mask_of(node)
    call = rows_call(node) if mask is None else None
    if isinstance(call, Refusal):
        return call
    if spec != row_dims(node):
        return Refusal(OTHER_ROWS)
    needs: OperandSpecs = dict.fromkeys(call.tensors if call else tensor_inputs(node), WHOLE)
    for operand, held in operands_of(node).items():
        if held.rows is not None:
            needs[operand] = (held.rows,) if operand is mask else spec
    return needs


class RowsCall(NamedTuple):
    """The arguments of an attention, as those of the op of graph/attention_rows.py.

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
    tensors = _tensors(node, names)
    if _tensors(node, (*_OTHER_TENSORS, *_MASKS)) or len(tensors) != len(names):
        return Refusal(OTHER_KERNEL)
    of_queries = tensors[int(attention.backward) :][:3]
    query, key, value = (operand.meta["val"] for operand in of_queries)
    results = list(tensors_of(node.meta["val"]))
    log_sums = tensors[-1].meta["val"] if attention.backward else results[1]
    rows = query.shape[:3]
    column = same_shape(log_sums.shape, (*rows, 1))
    if not is_fused(query, key, value) or not (column or same_shape(log_sums.shape, rows)):
        return Refusal(OTHER_KERNEL)
    causal = bool(argument(node, "is_causal"))
    if causal and not same_shape(query.shape[ROWS:3], key.shape[ROWS:3]):
        return Refusal(OWN_LOOPS("causal attention of other tokens than those of the keys"))
    scale = argument(node, "scale")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    return RowsCall(tuple(tensors), query.shape[ROWS], causal, scale, column)
