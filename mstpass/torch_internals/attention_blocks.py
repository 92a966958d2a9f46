"""Attention to one block of keys, with what is needed to merge it with attention to other blocks.

Of a block, a query gets the mixed values and the *log-sum* of its scores, log sum_j exp(s_j). The
fused kernels compute both, and their backward takes the log-sum of all blocks together: then a
block's gradients are its share of those of the whole.

========================  =======================================================================
CPU                       ``_scaled_dot_product_flash_attention_for_cpu``
CUDA, 16 bits             ``_scaled_dot_product_flash_attention``, for heads of a multiple of 8
anything else             products and a softmax: the scores of the block exist
========================  =======================================================================

Grouped queries, of which several heads read one head of keys, are taken as they are.

Source: aten/src/ATen/native/native_functions.yaml (2.11 to 2.15).
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The mixed values ``[B, H, s, D]`` and the log-sums ``[B, H, s]``, in float32 at least.

    Args:
        causal: query i sees the keys up to i of this block; else all of them.
    """
    if query.device.type == "cpu" and _alike(query, key, value):
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, log_sum
    if _takes_flash(query, key, value):
        out, log_sum = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )[:2]
        return out, log_sum
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    scores = _scores(query, key, causal, scale)
    log_sum = scores.logsumexp(-1)
    shares = (scores - log_sum.unsqueeze(-1)).exp()
    return shares.to(value.dtype) @ value, log_sum


def gradients_of_block(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of the queries, and the gradients of its keys and values.

    Args:
        grad: of ``out``.
        out: the mixed values of all blocks together.
        log_sum: the log-sums of all blocks together.
    """
    if query.device.type == "cpu" and _alike(query, key, value):
        return tuple(
            aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad, query, key, value, out, log_sum, 0.0, causal), scale=scale
            )
        )
    # the state of dropout's random numbers, which are not drawn; dense operands have no lengths
    state = torch.empty((2,), dtype=torch.uint64, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    if _takes_flash(query, key, value):
        return tuple(
            aten._scaled_dot_product_flash_attention_backward(
                *(grad, query, key, value, out, log_sum, *lengths),
                *(0.0, causal, state, torch.empty_like(state)),
                scale=scale,
            )
        )
    grouped, (key, value) = key.shape, (_for_each_head(query, x) for x in (key, value))
    shares = (_scores(query, key, causal, scale) - log_sum.unsqueeze(-1)).exp()
    of_values = shares.to(grad.dtype).transpose(2, 3) @ grad
    of_shares = (grad @ value.transpose(2, 3)).to(shares.dtype)
    mean = (grad.to(shares.dtype) * out.to(shares.dtype)).sum(-1, keepdim=True)
    of_scores = (shares * (of_shares - mean) * scale).to(query.dtype)
    of_keys = of_scores.transpose(2, 3) @ query
    heads = grouped[1]
    of_keys, of_values = (x.unflatten(1, (heads, -1)).sum(2) for x in (of_keys, of_values))
    return of_scores @ key, of_keys, of_values


def is_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a kernel takes these operands, so that no scores exist."""
    on_cpu = query.device.type == "cpu" and _alike(query, key, value)
    return on_cpu or _takes_flash(query, key, value)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.shape[-1] == key.shape[-1] == value.shape[-1]


def _takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return query.device.type == "cuda" and half and fits and _alike(query, key, value)


def _for_each_head(query: Tensor, x_BKsD: Tensor) -> Tensor:
    """Keys or values of each head of the queries."""
    return x_BKsD.repeat_interleave(query.shape[1] // x_BKsD.shape[1], 1)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (query @ key.transpose(2, 3)) * scale
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not causal:
        return wide
    place = torch.arange(query.shape[2], device=query.device)
    return wide.masked_fill(place[:, None] < place[None, :], float("-inf"))
