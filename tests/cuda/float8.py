"""An MLP with float8 products, scaled as torchao scales them: by row, or by whole matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cuda.dry_run import tensor
from tests.cuda.steps import BF16, Step

_LARGEST = 448.0  # of float8_e4m3fn


def _quantized(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """The matrix in float8, and its scales: one for all values along ``dim``, or one in all."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.float().clamp(min=1e-12) / _LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


class Float8Product(torch.autograd.Function):
    """``x @ weight.T``; the weight's gradient stays a product of bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        left, of_left = _quantized(x, 1 if by_row else None)
        right, of_right = _quantized(weight, 1 if by_row else None)
        return torch._scaled_mm(left, right.t(), of_left, of_right.t(), out_dtype=BF16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        left, of_left = _quantized(gradient, 1 if ctx.by_row else None)
        right, of_right = _quantized(weight, 0 if ctx.by_row else None)
        columns = right.t().contiguous().t()
        of_x = torch._scaled_mm(left, columns, of_left, of_right, out_dtype=BF16)
        return of_x, gradient.t() @ x, None


class Layer(nn.Module):
    def __init__(self, width: int, by_row: bool):
        super().__init__()
        self.norm, self.out = nn.RMSNorm(width, dtype=BF16), nn.RMSNorm(width, dtype=BF16)
        self.up = nn.Parameter(torch.empty(4 * width, width, dtype=BF16))
        self.down = nn.Parameter(torch.empty(width, 4 * width, dtype=BF16))
        self.by_row = by_row

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(Float8Product.apply(self.norm(x), self.up, self.by_row))
        return self.out(x + Float8Product.apply(wide, self.down, self.by_row))


def mlp(by_row: bool, tokens: int = 16384, width: int = 1024) -> Step:
    with torch.device("meta"):
        layer = Layer(width, by_row)

    def loss(x: Tensor) -> Tensor:
        return layer(x).float().square().mean()

    return loss, (tensor(tokens, width, grad=True),)
