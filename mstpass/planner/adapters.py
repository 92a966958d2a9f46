"""LoRA beside frozen weights, and frozen weights in 4 bits: as peft and bitsandbytes hold them.

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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.errors import UserError
from mstpass.planner.training import ALL, NF4, Training

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
