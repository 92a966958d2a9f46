"""Attention in the spellings of the field, as small modules ``[B, N, D] -> [B, N, D]``."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 64, 4


@dataclasses.dataclass(frozen=True)
class Form:
    """How attention is spelled.

    Attributes:
        kernel: ``"sdpa"``, or ``"matmul"``: written out in products.
        rope: ``"halves"``, ``"pairs"``, ``"complex"`` (pairs as complex numbers) or none.
        mask: ``"causal"``, ``"window"``, ``"sink"``, ``"heads"`` (a bias of its own for each head),
            or none.
        fused: ``"sections"``: one product for q, k and v, one after the other; ``"heads"``: the
            same, but head by head.
        norm: of q and k: ``"head"``, ``"all"`` (over all heads), or none.
        lora: the projections have updates of this rank.
        cap: of the scores.
    """

    kernel: str = "sdpa"
    kv_heads: int = HEADS
    bias: bool = False
    norm: str = ""
    rope: str = ""
    mask: str = ""
    fused: str = ""
    lora: int = 0
    cap: float = 0.0
    dropout: float = 0.0
    cross: bool = False
    shared_kv: bool = False  # enable_gqa=True in place of repeated keys and values


class LowRank(nn.Module):
    """A linear layer and an update of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class Attention(nn.Module):
    def __init__(self, form: Form, width: int = WIDTH, heads: int = HEADS):
        super().__init__()
        self.form, self.heads, self.features = form, heads, width // heads
        narrow = form.kv_heads * self.features

        def linear(inputs: int, outputs: int) -> nn.Module:
            if form.lora:
                return LowRank(inputs, outputs, form.lora)
            return nn.Linear(inputs, outputs, bias=form.bias)

        if form.fused:
            self.qkv = linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (
                linear(width, width),
                linear(width, narrow),
                linear(width, narrow),
            )
        self.out = linear(width, width)
        normed = {"head": self.features, "all": width}.get(form.norm)
        self.q_norm = nn.RMSNorm(normed) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(normed) if normed else nn.Identity()
        self.sink = nn.Parameter(torch.randn(heads))
        self.slope = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (self._heads_apart(t) for t in self._projected(x, x if other is None else other))
        if self.form.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.form.rope:
            q, k = (rotated(t, self.form.rope) for t in (q, k))
        result = self._written_out(q, k, v) if self.form.kernel == "matmul" else self._sdpa(q, k, v)
        return self.out(result.transpose(1, 2).reshape(batch, length, -1))

    def _projected(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.form.fused == "sections":
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        elif self.form.fused == "heads":
            parts = self.qkv(x).view(*x.shape[:2], self.heads, 3 * self.features)
            q, k, v = (t.reshape(x.shape) for t in parts.chunk(3, dim=-1))
        else:
            q, k, v = self.q(x), self.k(other), self.v(other)
        if self.form.norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _heads_apart(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.features)

    def _repeated(self, x: Tensor) -> Tensor:
        batch, heads, length, features = x.shape
        times = self.heads // heads
        if times == 1:
            return x
        return (
            x[:, :, None]
            .expand(batch, heads, times, length, features)
            .reshape(batch, self.heads, length, features)
        )

    def _bias(self, length: int, keys: int) -> Tensor | None:
        """What is added to the scores."""
        distance = torch.arange(length)[:, None] - torch.arange(keys)
        if self.form.mask == "window":
            return torch.where((distance >= 0) & (distance < 8), 0.0, -torch.inf)
        if self.form.mask == "heads":
            return -distance.abs() * self.slope.exp()[:, None, None]
        if self.form.mask in ("causal", "sink"):
            return torch.where(distance >= 0, 0.0, -torch.inf)
        return None

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.form.shared_kv:
            k, v = self._repeated(k), self._repeated(v)
        causal = self.form.mask == "causal"
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if causal else self._bias(q.shape[2], k.shape[2]),
            is_causal=causal,
            dropout_p=self.form.dropout,
            enable_gqa=self.form.shared_kv,
        )

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self._repeated(k), self._repeated(v)
        scores = q @ k.transpose(2, 3) * self.features**-0.5
        if self.form.cap:
            scores = self.form.cap * torch.tanh(scores / self.form.cap)
        bias = self._bias(q.shape[2], k.shape[2])
        if bias is not None:
            scores = scores + bias
        if self.form.mask == "sink":
            sinks = self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        return F.dropout(weights, self.form.dropout) @ v


def rotated(x: Tensor, spelling: str) -> Tensor:
    """The rotary embedding of ``[B, heads, N, d]``."""
    length, features = x.shape[2:]
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / features)
    angles = torch.outer(torch.arange(length), frequencies)
    if spelling == "complex":
        turns = torch.polar(torch.ones_like(angles), angles)
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns).flatten(-2).to(x.dtype)
    if spelling == "pairs":
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    cos, sin = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Attention behind a norm, and a residual around both."""

    def __init__(self, form: Form, width: int = WIDTH, heads: int = HEADS):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), Attention(form, width, heads)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return x + self.attention(self.norm(x), other)


class LatentLayer(nn.Module):
    """Attention of queries, keys and values from latents, as DeepSeek-V3's: after a norm, added.

    Each key has a part of its own and a rotated part that all heads share. Keys may be longer than
    values, which are then padded if the kernel asks for equal lengths.
    """

    def __init__(self, padded: bool = False, width: int = WIDTH, heads: int = HEADS):
        super().__init__()
        self.padded, self.heads, self.own, self.rotated, self.value = padded, heads, 8, 4, 6
        self.norm = nn.RMSNorm(width)
        self.q_down, self.q_norm = nn.Linear(width, 24, bias=False), nn.RMSNorm(24)
        self.q_up = nn.Linear(24, heads * (self.own + self.rotated), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(width, 16 + self.rotated, bias=False), nn.RMSNorm(16)
        self.kv_up = nn.Linear(16, heads * (self.own + self.value), bias=False)
        self.out = nn.Linear(heads * self.value, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self._heads(self.q_up(self.q_norm(self.q_down(h))))
        latent, shared = self.kv_down(h).split([16, self.rotated], -1)
        kv = self._heads(self.kv_up(self.kv_norm(latent)))
        own, v = kv.split([self.own, self.value], -1)
        q_own, q_rotated = q.split([self.own, self.rotated], -1)
        q = torch.cat([q_own, _rotated_by_position(q_rotated)], -1)
        shared = _rotated_by_position(shared[:, None]).expand(-1, self.heads, -1, -1)
        k = torch.cat([own, shared], -1)
        if self.padded:
            v = F.pad(v, [0, k.shape[-1] - self.value])
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.value]
        return x + self.out(result.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _rotated_by_position(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * torch.linspace(1, 0.1, half).repeat(2)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)
