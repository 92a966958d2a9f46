"""The sizes of a fused attention, read off its call: for its cost, its memory and its offsets.

Queries are (B, H, S, D), keys (B, K, T, D) and values (B, K, T, E), or with heads behind the rows,
or sequences in one row (``varlen``): (rows, H, D), of which S is the longest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.op_table import row_of
from mstpass.graph.sizes import hint, hint_shape
from mstpass.torch_internals.graphs import Argument, OpCall, Operand, op_call


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """By the letters above; ``rows`` is B S. What is held of the op and the queries besides."""

    B: int
    H: int
    K: int
    S: int
    T: int
    D: int
    E: int
    rows: int
    key_rows: int
    dtype: torch.dtype
    device: torch.device
    backward: bool
    heads_first: bool
    in_one_row: bool = False


def attention_sizes(call: OpCall) -> AttentionSizes | None:
    """None where an operand is missing or has other dims than are known."""
    query, key, value = map(call.operand, ("query", "key", "value"))
    attention = row_of(call.op).attention
    if query is None or key is None or value is None or attention is None:
        return None
    D, E, first = query.shape[-1], value.shape[-1], attention.heads_dim == 1
    of_query = query.dtype, query.device, attention.backward, first
    if len(query.shape) == 3:
        (rows, H, _), (key_rows, K, _) = query.shape, key.shape
        starts = call.operand("cum_seq_q")
        B = 1 if starts is None else max(1, starts.numel - 1)
        S, T = int(call.number("max_q", rows)), int(call.number("max_k", key_rows))
        return AttentionSizes(B, H, K, S, T, D, E, rows, key_rows, *of_query, in_one_row=True)
    if len(query.shape) != 4:
        return None
    (B, H, S, _), (_, K, T, _) = query.shape, key.shape
    if not first:
        (H, S), (K, T) = (S, H), (T, K)
    return AttentionSizes(B, H, K, S, T, D, E, B * S, B * T, *of_query)


def call_of(node: fx.Node) -> OpCall:
    """The call of a node; symbolic sizes count with their hints."""
    return op_call(node.target, node.args, node.kwargs, argument_of)


def argument_of(given: Any) -> Argument:
    """An argument of a node, or of an op that is run, as plain data."""
    if isinstance(given, fx.Node):
        value = value_of(given)
        given = given.meta.get("val") if value is None else value
    if isinstance(given, torch.Tensor):
        stride = tuple(map(hint, given.stride()))
        return Operand(tuple(hint_shape(given)), stride, given.dtype, given.device)
    if isinstance(given, torch.SymInt):
        return hint(given)
    return given if isinstance(given, int | float) else None


# ---- whole pieces --------------------------------------------------------------------------------
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def padded_features(D: int) -> int:
    """The features of a head in flash attention's sums of gradients."""
    return round_up(D, 32 if D <= 128 else 64)
