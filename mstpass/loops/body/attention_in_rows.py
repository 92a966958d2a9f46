"""Attention of a chunk of tokens in a loop's body: the op of graph/attention_rows.py."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mstpass.graph.attention import RowsCall, is_attention, is_backward, operand_rows, rows_call
from mstpass.graph.attention_rows import attend_rows, attend_rows_backward
from mstpass.graph.builder import Builder
from mstpass.graph.chunk_form import OperandChunk
from mstpass.graph.tokens import Refusal, Spec


def attention_in_rows(members: Iterable[fx.Node]) -> dict[fx.Node, RowsCall]:
    """The members of a loop that the op for rows computes; a mask has rows of its own."""
    calls = {node: rows_call(node) for node in members if is_attention(node)}
    return {node: call for node, call in calls.items() if not isinstance(call, Refusal)}


def attend_chunk(
    builder: Builder,
    node: fx.Node,
    spec: Spec,
    call: RowsCall,
    operand_chunk: OperandChunk,
    start: fx.Node | None,
    overlaps: bool,
) -> fx.Node:
    """The attention of one chunk; its results are the first of the node's.

    Args:
        spec: the dims of the node's rows.
        operand_chunk: gives the chunk of an operand.
        overlaps: the last chunk has rows of the one before it.
    """
    needs = operand_rows(node, spec)
    assert not isinstance(needs, Refusal), "the needs is no refusal"
    inputs = [operand_chunk(n, needs[n]) for n in call.tensors]
    how = (start, call.length, call.causal, call.scale)
    if is_backward(node):
        return builder.call(attend_rows_backward, *inputs, *how, overlaps)
    return builder.call(attend_rows, *inputs, *how, call.column)
