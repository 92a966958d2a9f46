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

LoRA beside frozen weights, and frozen weights in 4 bits: as peft and bitsandbytes hold them.

A linear layer y = x W^T with LoRA is y = x W^T + (x A^T) B^T s, where A has ``rank`` rows and B as
many columns. W is frozen, and so is all else of the model. Under ``nf4``, W is two weights in a
byte and a float32 scale for each block of 64; a kernel makes the whole W of a layer, which is
dropped after its product, and once more for the gradient of x. Embeddings, norms and the head stay
as they are. A and B have the dtype of the model's weights. Neither package is needed here: nothing
runs, and bytes follow from shapes.

Sources: peft 0.21, tuners/lora/layer.py; bitsandbytes, nn/modules.py (``Params4bit``) and
autograd/_functions.py (``MatMul4Bit``). The op here stands for ``bitsandbytes::dequantize_4bit``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.errors import UserError
from mstpass.integrations.transformers_masks import prepare
from mstpass.planner.training import ALL, MODEL, NF4, Training

_BLOCK = 64  # weights for each scale


class TargetError(UserError):
    """No linear layer has one of the names of ``--target``."""


@torch.library.custom_op("mstpass::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """The weight ``[rows, columns]`` of packed codes. It is traced, and runs nowhere."""
    raise NotImplementedError("mstpass::dequantize_nf4 is for plans")


@dequantize_nf4.register_fake
def _(codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


class _Product(torch.autograd.Function):
    """``x W^T``, which keeps the codes of W for its backward, as ``MatMul4Bit`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, *made_as: Any) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.made_as = made_as
        return F.linear(x, dequantize_nf4(codes, scales, *made_as))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        weight = dequantize_nf4(*ctx.saved_tensors, *ctx.made_as)
        return grad_outputs[0] @ weight, None, None, None, None, None


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is in 4 bits."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight
        self.rows, self.columns = weight.shape
        codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(-(-weight.numel() // _BLOCK), device=weight.device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.codes, self.scales, self.rows, self.columns, x.dtype)
        return y if self.bias is None else y + self.bias


class WithLora(nn.Module):
    """A frozen linear layer, and what is trained beside it."""

    def __init__(self, linear: nn.Linear, rank: int, quantized: bool):
        super().__init__()
        weight, columns, rows = linear.weight, linear.in_features, linear.out_features
        self.base = Nf4Linear(linear) if quantized else linear
        self.down = nn.Linear(columns, rank, bias=False, dtype=weight.dtype, device=weight.device)
        self.up = nn.Linear(rank, rows, bias=False, dtype=weight.dtype, device=weight.device)
        self.scale = 2.0  # of any value, as for times and memory

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.up(self.down(x)) * self.scale


def add_adapters(model: nn.Module, layers: list[nn.Module], training: Training) -> None:
    """Freeze a model, and put LoRA beside the linear layers of its layers.

    Raises:
        TargetError: there are none, or a name of ``training.target`` is that of none.
    """
    model.requires_grad_(False)
    names = None if training.target == ALL else set(training.target.split(","))
    quantized, found, others = training.weights == NF4, set(), set()
    for layer in layers:
        for parent, name, linear in _linear_layers(layer):
            if names is None or name in names:
                found.add(name)
                setattr(parent, name, WithLora(linear, training.lora, quantized))
                continue
            others.add(name)
            if quantized:
                setattr(parent, name, Nf4Linear(linear))
    missing = sorted((names or set()) - found)
    if missing or not found:
        known = ", ".join(sorted(found | others)) or "none"
        raise TargetError(
            f"--target {training.target}: no linear layer of {type(model).__name__} is called "
            f"{', '.join(missing) or 'anything'}; its linear layers are {known}"
        )


def _linear_layers(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Each linear layer with the module that holds it, and its name there."""
    return [
        (parent, name, child)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]


def numel_of(module: nn.Module) -> int:
    """The number of frozen weights that a module itself holds."""
    if isinstance(module, Nf4Linear):
        bias = 0 if module.bias is None else module.bias.numel()
        return module.rows * module.columns + bias
    return sum(p.numel() for p in module.parameters(recurse=False) if not p.requires_grad)


# ---- attention -----------------------------------------------------------------------------------
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
