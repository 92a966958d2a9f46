"""A step with a Triton kernel of the user's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from tests.cuda.dry_run import tensor


@triton.jit
def _double(source, target, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + places, mask=places < size)
    tl.store(target + places, 2 * values, mask=places < size)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _doubled(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _doubled(gradient)


def _doubled(x: Tensor) -> Tensor:
    doubled = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), 1024),)](x, doubled, x.numel(), BLOCK=1024)
    return doubled


def step(tokens: int = 8192, width: int = 1024, vocabulary: int = 128256) -> Any:
    with torch.device("meta"):
        lm_head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(lm_head(Double.apply(x)).float(), labels)

    labels = torch.empty(tokens, dtype=torch.long, device="meta")
    return loss, (tensor(tokens, width, grad=True), labels)
