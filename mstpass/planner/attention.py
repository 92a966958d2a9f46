"""The attention that a model is planned with: ops that CUDA would run, on fake tensors.

==========  ================================================================================
``model``   what transformers chooses for the model. If that is ``sdpa``, the op is the one that
            torch takes on CUDA: flash attention where there is no mask, and else efficient
            attention, for which transformers repeats the heads of keys and values. Masks are those
            that transformers builds for a model compiled with ``mstpass.compile``: none where the
            flag ``is_causal`` will do, and one of N x N for a window shorter than the sequence.
            Attention that is written out in products (``eager``) is planned as it is.
``flash``   FlashAttention-2, by itself: it needs no mask for windows, and skips padding
==========  ================================================================================

Shapes: queries (B, H, S, D), keys (B, K, T, D), values (B, K, T, E), masks (B or 1, 1, S, T).

Sources: transformers 5.24, integrations/sdpa_attention.py; torch 2.13,
aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.integrations.transformers_masks import prepare
from mstpass.planner.training import MODEL, Training

_NAME = "mstpass_planned"  # a name with "flash" makes transformers look for a package
_SDPA = "sdpa"
_MOST_FEATURES = 256  # of a head, in flash attention


def plan_attention(model: nn.Module, training: Training) -> None:
    """Let a model of transformers run the ops that it is planned with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config: Any = model.config
    if training.attention != MODEL:
        AttentionInterface.register(_NAME, functools.partial(_flash, training.document))
        AttentionMaskInterface.register(_NAME, _no_mask)
    elif config._attn_implementation == _SDPA:
        prepare()
        AttentionInterface.register(_NAME, _sdpa)
        AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[_SDPA])
    else:
        return
    config._attn_implementation = _NAME


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """``sdpa`` as CUDA runs it; the result is (B, S, H, D)."""
    query, key, value = _cast(query, key, value)
    causal = mask is None and (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    )
    if mask is None and _takes_flash(query, value):
        return _kernel("flash", query, key, value, rest, causal), None
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (_repeated(x, repeats) for x in (key, value))
    bias = None if mask is None else _bias(mask, query, key)
    return _kernel("efficient", query, key, value, rest, causal, bias, True), None


def _kernel(
    name: str, query: Tensor, key: Tensor, value: Tensor, rest: Any, causal: bool, *more: Any
) -> Tensor:
    """The result of an attention op, (B, S, H, D); ``rest`` are arguments of transformers'."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    dropout, scale = rest.get("dropout") or 0.0, rest.get("scaling")
    out: Tensor = op(query, key, value, *more, dropout, causal, scale=scale)[0]
    return out.transpose(1, 2)


def _takes_flash(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes tensors of this dtype and these sizes of heads."""
    sizes = query.shape[-1], value.shape[-1]
    return query.dtype != torch.float32 and len({*sizes}) == 1 and sizes[0] <= _MOST_FEATURES


def _repeated(x_BKTD: Tensor, repeats: int) -> Tensor:
    """Each head of keys or values for all heads of queries that share it, as transformers does."""
    B, K, T, D = x_BKTD.shape
    return x_BKTD[:, :, None].expand(B, K, repeats, T, D).reshape(B, K * repeats, T, D)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: summands of the queries' dtype, seen by all heads."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, -torch.inf)
    B, H, S, _ = query.shape
    return mask.to(query.dtype).expand(B, H, S, key.shape[2])


def _flash(
    document: int | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **rest: Any,
) -> tuple[Tensor, None]:
    """FlashAttention-2; with ``document``, only the first ``document`` tokens attend to each other.

    transformers copies the tokens of a padded batch that are not padding before it calls the
    kernel. The result is (B, S, H, D).
    """
    padding = max(0, query.shape[2] - document) if document else 0
    if padding:
        query, key, value = (x[:, :, :document].clone() for x in (query, key, value))
    query, key, value = _cast(query, key, value)
    out = _kernel("flash", query, key, value, rest, True)
    return (F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out), None


def _cast(*tensors: Tensor) -> list[Tensor]:
    """What autocast makes of the operands of ``F.scaled_dot_product_attention``."""
    if torch.is_autocast_enabled("cpu"):
        return [x.to(torch.bfloat16) for x in tensors]
    return list(tensors)


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the kernel applies causal masks and windows itself."""
