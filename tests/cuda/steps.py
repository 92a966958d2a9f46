"""Steps that are compiled for a GPU. Their tensors are on the meta device: they take no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cuda.dry_run import tensor
from tests.models import GatedMLP, TwoLayerMLP

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def head(
    tokens: int = 8192, width: int = 1024, vocabulary: int = 128256, dtype: torch.dtype = BF16
) -> Step:
    """A language model's head with its loss."""
    with torch.device("meta"):
        lm_head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(lm_head(x).float(), labels)

    labels = torch.empty(tokens, dtype=torch.long, device="meta")
    return loss, (tensor(tokens, width, dtype=dtype, grad=True), labels)


class Layers(nn.Module):
    """Two MLPs with their norms and residuals, and a norm behind them."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        wide = 4 * width
        mlp: Callable[[], nn.Module] = {
            "swiglu": lambda: GatedMLP(width, wide, "silu"),
            "gelu": lambda: TwoLayerMLP(width, wide, "gelu", bias=True),
        }[kind]
        self.mlps = nn.ModuleList(mlp() for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in zip(self.norms, self.mlps, strict=False):
            x = x + mlp(norm(x))
        return self.norms[-1](x)


def mlps(
    kind: str = "swiglu", tokens: int = 8192, width: int = 1024, dtype: torch.dtype = BF16
) -> Step:
    with torch.device("meta"):
        layers = Layers(width, kind).to(dtype)

    def loss(x: Tensor) -> Tensor:
        return layers(x).float().square().mean()

    return loss, (tensor(tokens, width, dtype=dtype, grad=True),)
