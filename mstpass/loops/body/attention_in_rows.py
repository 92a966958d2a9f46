"""Attention of a chunk of tokens in a loop's body: the op of graph/attention_rows.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from mstpass.graph.attention_rows import attend_rows, attend_rows_backward
from mstpass.graph.builder import Builder
from mstpass.graph.heads import is_attention
from mstpass.graph.query_rows import RowsCall, is_backward, rows_call
from mstpass.graph.tokens import Refusal


def attention_in_rows(members: Iterable[fx.Node]) -> dict[fx.Node, RowsCall]:
    """The members of a loop that the op for rows computes; a mask has rows of its own."""
    calls = {node: rows_call(node) for node in members if is_attention(node)}
    return {node: call for node, call in calls.items() if not isinstance(call, Refusal)}


def attend_chunk(
    builder: Builder,
    node: fx.Node,
    call: RowsCall,
    operands: Mapping[fx.Node, fx.Node],
    start: fx.Node,
    overlaps: bool,
) -> fx.Node:
    """The attention of one chunk; its results are the first of the node's.

    Args:
        operands: what the node's operands are in the body.
        overlaps: the last chunk has rows of the one before it.
    """
    inputs = [operands[n] for n in call.tensors]
    how = (None, start, call.length, call.causal, -1, -1, call.scale)
    if is_backward(node):
        return builder.call(attend_rows_backward, *inputs, *how, overlaps)
    return builder.call(attend_rows, *inputs, *how)
