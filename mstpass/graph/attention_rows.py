"""Attention of some rows of queries, told by the number of the first one, to keys that are whole.

    mstpass::attend_rows(query, key, value, start, length, causal, scale)
                                                        -> result, logarithms of sums
    mstpass::attend_rows_backward(grad_out, query, key, value, out, logsumexp, start, ...)
                                                        -> gradients of query, key, value
    mstpass::add_attend_rows_backward_(of_key, of_value, grad_out, query, ...)
                                                        -> gradient of query; adds the others

Of B sequences of ``length`` queries, with T keys each, a row is a query of all heads, and the rows
of all sequences are numbered one after the other. The c rows from ``start`` on::

    query, out, gradients of both   [1, H, c, D]
    logarithms of sums              [1, H, c], or [1, H, c, 1] as a ``column``, which cuDNN's are
    key, value, gradients of both   [B, K, T, D], where K divides H: grouped queries

``start`` is on the host, so that a loop on a GPU is not waited for, and an argument of the op, so
that nothing outside of it depends on the number of keys that the rows see. Causal attention reads
the keys up to its last row: no score is computed that the whole attention leaves out. Chunks of c
rows begin at multiples of c; where ``overlaps``, the last one may begin before, and its rows that
another chunk has as well add nothing to the gradients of keys and values. Causal attention is that
to the earlier keys and that to the rows' own, whose results are merged by their log-sums; with the
log-sum and the result of both, the backward of each block of keys (``keys_of_block``) gives an
exact part of the gradients. What the rows add to the gradients of keys and values is zero where
they see no key.

A causal kernel is called for as many queries as keys alone, as torch's kernels align the mask of
others at different corners. Nor is a kernel called without keys: torch 2.13's divides by zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mstpass.torch_internals.attention_blocks import attend_block, gradients_of_block
from mstpass.torch_internals.graphs import own_op

# Of the backward, in a block that all rows see: at least so many, and so many for each row. The
# gradients of a block's keys exist beside their sums; each block's part of the gradient of the
# queries is added up in memory.
KEYS, KEYS_OF_ROW = 2048, 4

_HOW = "SymInt start, SymInt length, bool is_causal, float scale"
_SAVED = "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp"
_BACKWARD = f"{_SAVED}, {_HOW}, bool overlaps"


class _Block(NamedTuple):
    """Keys that rows see: all of them, or those up to the row."""

    first: int
    end: int
    causal: bool = False

    def of(self, x: Tensor) -> Tensor:
        """These keys, or their values."""
        return x[:, :, self.first : self.end]


class _How(NamedTuple):
    """Which rows the queries are, and which keys they see: arguments of each op, in their order."""

    start: int
    length: int
    causal: bool
    scale: float


class _Rows(NamedTuple):
    """The rows of a chunk that belong to one sequence, as numbers in the chunk and in it."""

    sequence: int
    in_chunk: slice
    first: int
    end: int


def _rows_of_sequences(start: int, rows: int, length: int, split: int = 0) -> Iterator[_Rows]:
    """The parts of a chunk that are of one sequence, and on one side of row ``split`` in it."""
    here = 0
    while here < rows:
        sequence, first = divmod(start + here, length)
        count = min(length - first, (split if here < split else rows) - here)
        yield _Rows(sequence, slice(here, here + count), first, first + count)
        here += count


def _blocks(rows: _Rows, keys: int, causal: bool, most: int | None = None) -> list[_Block]:
    """The blocks of keys that the rows of one sequence see.

    Args:
        most: keys of a block that all rows see; None: any number.
    """
    full = rows.first if causal else keys
    most = most or max(1, full)
    found = [_Block(first, min(first + most, full)) for first in range(0, full, most)]
    return [*found, _Block(rows.first, rows.end, causal=True)] if causal else found


def keys_of_block(rows: int) -> int:
    """The keys of a block in the backward of a chunk of so many rows."""
    return max(KEYS, KEYS_OF_ROW * rows)


def _folded(x: Tensor, heads: int) -> Tensor:
    """The heads of the queries that read one head of keys as its rows."""
    return x.reshape(1, heads, -1, *x.shape[3:])


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    how, column = _How(*arguments[:-1]), arguments[-1]
    result, log_sums = _empty_results(query, value)
    for rows in _rows_of_sequences(how.start, query.shape[2], how.length):
        own = slice(rows.sequence, rows.sequence + 1)
        k, v, q = key[own], value[own], query[:, :, rows.in_chunk]
        out, log_sum = None, None
        for block in _blocks(rows, key.shape[2], how.causal):
            part, its_log_sum = _attend(q, k, v, block, how.scale)
            if out is None or log_sum is None:
                out, log_sum = part, its_log_sum
                continue
            both = torch.logaddexp(log_sum, its_log_sum)
            out = out.to(both.dtype).mul_(_share(log_sum, both))
            out.add_(part.to(both.dtype).mul_(_share(its_log_sum, both)))
            log_sum = both
        assert out is not None and log_sum is not None, "both results are known"
        result[:, :, rows.in_chunk] = out
        log_sums[:, :, rows.in_chunk] = log_sum
    return result, log_sums.unsqueeze(-1) if column else log_sums


def _attend(
    q: Tensor, key: Tensor, value: Tensor, block: _Block, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = block.of(key), block.of(value)
    if block.causal:
        return attend_block(q, k, v, True, scale)
    out, log_sum = attend_block(_folded(q, k.shape[1]), k, v, False, scale)
    return out.reshape(*q.shape[:3], -1), log_sum.reshape(q.shape[:3])


def _share(log_sum: Tensor, of_both: Tensor) -> Tensor:
    return (log_sum - of_both).exp_().unsqueeze(-1)


def _attend_rows_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_keys = torch.zeros(key.shape, dtype=key.dtype, device=key.device)
    of_values = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    operands = of_keys, of_values, grad_out, query, key, value
    return _add_backward(*operands, *arguments), of_keys, of_values


def _add_backward(
    of_key: Tensor,
    of_value: Tensor,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *arguments: Any,
) -> Tensor:
    how, overlaps = _How(*arguments[:-1]), arguments[-1]
    result, logsumexp = _like_rows(query, query.shape[-1]), logsumexp.reshape(query.shape[:3])
    most = keys_of_block(query.shape[2])
    counted = -how.start % query.shape[2] if overlaps else 0  # rows that an earlier chunk has
    for rows in _rows_of_sequences(how.start, query.shape[2], how.length, counted):
        own, here = slice(rows.sequence, rows.sequence + 1), rows.in_chunk
        k, v = key[own], value[own]
        of_rows, of_query = [x[:, :, here] for x in (grad_out, query, out, logsumexp)], None
        for block in _blocks(rows, key.shape[2], how.causal, most):
            of_q, of_k, of_v = _gradients(block, how.scale, k, v, *of_rows)
            if here.start >= counted:
                of_key[own, :, block.first : block.end] += of_k
                of_value[own, :, block.first : block.end] += of_v
            wide = of_q.to(logsumexp.dtype)
            of_query = wide if of_query is None else of_query.add_(wide)
        assert of_query is not None, "the rows of queries are known"
        result[:, :, here] = of_query
    return result


def _gradients(
    block: _Block, scale: float, key: Tensor, value: Tensor, *of_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a block of keys.

    Args:
        of_rows: the result's gradient, the queries, the result and the log-sums.
    """
    k, v = block.of(key), block.of(value)
    if block.causal:
        grad, q, out, log_sum = of_rows
        # the kernels read the log-sums of all rows in one run
        return gradients_of_block(grad, q, k, v, out, log_sum.contiguous(), True, scale)
    grad, q, out, log_sum = (_folded(x, k.shape[1]) for x in of_rows)
    of_q, of_k, of_v = gradients_of_block(grad, q, k, v, out, log_sum, False, scale)
    return of_q.reshape(of_rows[1].shape), of_k, of_v


def _like_rows(query: Tensor, features: int) -> Tensor:
    """A value by row, in memory row by row as what reads it next is."""
    _, heads, rows, _ = query.shape
    return query.new_empty(1, rows, heads, features).transpose(1, 2)


def _empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return _like_rows(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=wide)


def _fake_rows(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    result, log_sums = _empty_results(query, value)
    return result, log_sums.unsqueeze(-1) if how[-1] else log_sums


def _fake_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_keys, of_values = (x.new_empty(x.shape) for x in (key, value))
    return _like_rows(query, query.shape[-1]), of_keys, of_values


attend_rows = own_op(
    f"attend_rows(Tensor query, Tensor key, Tensor value, {_HOW}, bool column) -> (Tensor, Tensor)",
    _attend_rows,
    _fake_rows,
)
attend_rows_backward = own_op(
    f"attend_rows_backward({_BACKWARD}) -> (Tensor, Tensor, Tensor)",
    _attend_rows_backward,
    _fake_gradients,
)
add_attend_rows_backward_ = own_op(
    f"add_attend_rows_backward_(Tensor(a!) of_key, Tensor(b!) of_value, {_BACKWARD}) -> Tensor",
    _add_backward,
    lambda of_key, of_value, grad_out, query, *saved: _like_rows(query, query.shape[-1]),
)
ROW_OPS = (attend_rows, attend_rows_backward, add_attend_rows_backward_)
