"""Small models for the tests: every usual MLP, heads with every usual loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GatedMLP(nn.Module):
    def __init__(self, d: int, width: int, act: str, bias: bool = False):
        super().__init__()
        self.gate, self.up = nn.Linear(d, width, bias), nn.Linear(d, width, bias)
        self.down = nn.Linear(width, d, bias)
        self.act = getattr(F, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class FusedGatedMLP(nn.Module):
    def __init__(self, d: int, width: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 2 * width, False), nn.Linear(width, d, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class TwoLayerMLP(nn.Module):
    def __init__(self, d: int, width: int, act: str, bias: bool, approximate: str | None = None):
        super().__init__()
        self.up, self.down = nn.Linear(d, width, bias), nn.Linear(width, d, bias)
        self.act = (
            (lambda x: F.gelu(x, approximate=approximate)) if approximate else getattr(F, act)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Pre-norm residual block; its output norm gives the MLP's backward a real gradient."""

    def __init__(self, d: int, mlp: nn.Module):
        super().__init__()
        self.norm, self.out, self.mlp = nn.LayerNorm(d), nn.LayerNorm(d), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.mlp(self.norm(x)))


MLPS = {
    "swiglu": lambda d: GatedMLP(d, 3 * d, "silu"),
    "swiglu_bias": lambda d: GatedMLP(d, 3 * d, "silu", bias=True),
    "geglu": lambda d: GatedMLP(d, 4 * d, "gelu"),
    "fused_gate_up": lambda d: FusedGatedMLP(d, 3 * d),
    "gelu": lambda d: TwoLayerMLP(d, 4 * d, "gelu", bias=True),
    "gelu_tanh": lambda d: TwoLayerMLP(d, 4 * d, "gelu", bias=False, approximate="tanh"),
    "relu": lambda d: TwoLayerMLP(d, 4 * d, "relu", bias=False),
}


class TinyLM(nn.Module):
    """Embedding, one nonlinearity, head: the smallest model with an LM head."""

    def __init__(self, vocab: int, d: int, bias: bool = False, tied: bool = False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, d), nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.embed(ids)))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))


def next_token_loss(model: TinyLM, ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """Labels shifted as Hugging Face shifts them: padded, so that the logits keep their length."""
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    logits = model.logits(ids).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), **kwargs)


class Attention(nn.Module):
    """Causal self-attention with one projection to queries, keys and values."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d, False), nn.Linear(d, d, False), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
