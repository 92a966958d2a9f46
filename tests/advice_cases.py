"""Steps that mst refuses, each beside the same step with the report's advice followed.

Nothing here is ever computed: all tensors are on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import refused
from .refused import TOKENS, VOCABULARY, WIDTH, few_tokens, fine, hidden, labels, model

_HEADS = 4
_LEAST = {"memory_budget": 0.0}

with torch.device("meta"):
    other = refused.Head()
    qkv, out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    norm_of_all, norm_of_a_head = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH // _HEADS)
    few_rows = torch.zeros(64, 2 * TOKENS, requires_grad=True)
    mix_up, mix_down = nn.Linear(2 * TOKENS, 8 * TOKENS), nn.Linear(8 * TOKENS, 2 * TOKENS)
    memory = torch.zeros(TOKENS, VOCABULARY)
    largest = torch.zeros(TOKENS)
    is_token = torch.ones(TOKENS, dtype=torch.bool)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)


@dataclass(frozen=True)
class Case:
    """A step that is refused, and what becomes of it by its report's advice.

    Attributes:
        reason, advice: parts of what the report says.
        options: those of both steps.
        changed: options that follow the advice.
    """

    reason: str
    advice: str
    refused: Callable[..., Any]
    followed: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def _sorted_logits(h: Tensor = hidden) -> tuple[Tensor, Tensor]:
    logits = model(h)
    return _loss(logits, labels), logits.sort(-1).values


def _by_batch_statistics(h: Tensor = hidden) -> Tensor:
    logits = model(h)
    return _loss((logits - logits.mean(0)) / (logits.std(0) + 1e-5), labels)


def _median_of_a_stack(h: Tensor = hidden) -> Tensor:
    return _loss(torch.stack([model(h), other(h), model(2 * h)]).median(0).values, labels)


def _features_beside_tokens(h: Tensor = hidden) -> Tensor:
    return model(h).view(TOKENS // 2, 2 * VOCABULARY).log_softmax(-1).square().mean()


def _cumulative(h: Tensor = hidden) -> tuple[Tensor, Tensor]:
    logits = model(h)
    return _loss(logits, labels), logits.detach().cumsum(0).amax()


def _most_probable(h: Tensor = hidden) -> tuple[Tensor, Tensor]:
    logits = model(h)
    return _loss(logits, labels), logits.detach().argmax(-1)


def _logits_in_a_buffer(h: Tensor = hidden, memory: Tensor = memory) -> Tensor:
    logits = model(h)
    memory.add_(logits.detach())
    return _loss(logits, labels)


def _maxima_in_a_buffer(h: Tensor = hidden, largest: Tensor = largest) -> Tensor:
    logits = model(h)
    largest.copy_(logits.detach().amax(-1))
    return _loss(logits, labels)


def _heavy(h: Tensor = hidden) -> Tensor:
    return model(h).logsumexp(-1).square().mean() + model(h).mean(-1).cumsum(0).square().mean()


def _shifted(h: Tensor = hidden) -> Tensor:
    logits = model(h)
    return _loss(logits[1:] - logits[:-1], labels[1:])


def _mixes_tokens(h: Tensor = few_rows) -> Tensor:
    """An MLP-Mixer's part over tokens: its rows are the 64 features."""
    return mix_down(F.gelu(mix_up(h))).square().mean()


def _largest(h: Tensor = hidden, by_dim: bool = True) -> Tensor:
    logits = model(h)
    most = logits.max(0).values if by_dim else logits.amax(0)
    return _loss(logits, labels) + most.mean()


def _normalized_in_turn(h: Tensor = hidden, turns: int = 12) -> Tensor:
    logits = model(h)
    f, g = logits.new_zeros(TOKENS), logits.new_zeros(VOCABULARY)
    for _ in range(turns):
        f = (logits - g).logsumexp(1)
        g = (logits - f[:, None]).logsumexp(0)
    return ((logits - f[:, None] - g).exp() * logits).sum()


def _attention(
    h: Tensor,
    of_all: nn.Module | None = None,
    of_a_head: nn.Module | None = None,
    **arguments: Any,
) -> Tensor:
    q, k, v = qkv(h).view(1, -1, 3 * WIDTH).chunk(3, -1)
    if of_all:
        q, k = of_all(q), of_all(k)
    q, k, v = (x.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    if of_a_head:
        q, k = of_a_head(q), of_a_head(k)
    y = F.scaled_dot_product_attention(q, k, v, **arguments)
    return out(y.transpose(1, 2).reshape(-1, WIDTH)).square().mean()


def _padded(h: Tensor = hidden, is_token: Tensor = is_token) -> Tensor:
    return _attention(h, attn_mask=(is_token[None, :] & is_token[:, None])[None, None])


def _with_a_mask(h: Tensor = hidden, mask: Tensor = mask) -> Tensor:
    return _attention(h, attn_mask=mask)


def _causal(h: Tensor = hidden) -> Tensor:
    return _attention(h, is_causal=True)


CASES = {
    "logits that are returned": Case(
        "logits are an output", "returns only the loss", refused.logits_returned, fine
    ),
    "logits that nobody reads": Case(
        "logits are an output",
        "options={'logits': 'drop'}",
        refused.logits_returned,
        refused.logits_returned,
        changed={"logits": "drop"},
    ),
    "logits that are returned sorted": Case(
        "keeps the logits",
        "as the head makes them",
        _sorted_logits,
        refused.logits_returned,
        {"logits": "drop"},
    ),
    "one chunk": Case(
        "fit in one chunk",
        "a smaller chunk_tokens",
        fine,
        fine,
        {"chunk_tokens": TOKENS},
        {"chunk_tokens": 256},
    ),
    "few tokens, more of them": Case(
        "fewer than two chunks", "give this product more rows", few_tokens, fine
    ),
    "few tokens, shorter chunks": Case(
        "fewer than two chunks",
        "force a chunk length",
        few_tokens,
        few_tokens,
        changed={"chunk_tokens": 64},
    ),
    "too long, a budget": Case(
        "take too long", "set a memory_budget", _heavy, _heavy, changed=_LEAST
    ),
    "too long, more time": Case(
        "take too long",
        "a larger free_overhead",
        _heavy,
        _heavy,
        changed={"free_overhead": 2.0},
    ),
    "a shift, a budget": Case(
        "works along a token dim", "set a memory_budget", _shifted, _shifted, changed=_LEAST
    ),
    "few rows, a budget": Case(
        "fewer than two chunks", "set a memory_budget", _mixes_tokens, _mixes_tokens, changed=_LEAST
    ),
    "max(dim)": Case(
        "aten.max.dim reduces",
        "take amin or amax",
        _largest,
        lambda h=hidden: _largest(h, by_dim=False),
        _LEAST,
    ),
    "too many rounds": Case(
        "loops, more than",
        "fewer iterations",
        _normalized_in_turn,
        lambda h=hidden: _normalized_in_turn(h, turns=2),
        _LEAST,
    ),
    "an op of ATen": Case(
        "no token rule for aten._fft_r2c",
        "before the widening matmul",
        lambda h=hidden: _loss(torch.fft.rfft(model(h)).abs(), labels),
        lambda h=hidden: _loss(model(torch.fft.fft(h).abs()), labels),
    ),
    "an op of one's own": Case(
        "no token rule for tests_refused",
        "apply it to narrow values",
        refused.unknown_op,
        lambda h=hidden: _loss(model(refused.scale(h, 0.5)), labels),
    ),
    "the last token": Case(
        "picks single tokens",
        "head(h[:, -1])",
        refused.last_token,
        lambda h=hidden: _loss(model(h.view(4, -1, WIDTH)[:, -1]), labels.view(4, -1)[:, -1]),
    ),
    "a stack": Case(
        "aten.cat.default works along a token dim",
        "compute each one's loss by itself",
        _median_of_a_stack,
        lambda h=hidden: _loss(model(h), labels) + _loss(other(h), labels),
    ),
    "statistics": Case(
        "reduces over all tokens",
        "means, maxima or softmax over all tokens",
        refused.batch_statistics,
        _by_batch_statistics,
        options=_LEAST,
    ),
    "a metric over tokens": Case(
        "works along a token dim", "token by token", _cumulative, _most_probable
    ),
    "features beside tokens": Case(
        "mixes token dims with other dims",
        "keep tokens and features in separate dims",
        _features_beside_tokens,
        lambda h=hidden: model(h).log_softmax(-1).square().mean(),
    ),
    "a wide buffer": Case(
        "writes to its operands",
        "reduced token by token",
        _logits_in_a_buffer,
        _maxima_in_a_buffer,
    ),
    "a mask": Case("reads this mask whole", "pass no attention mask", _padded, _causal),
    "a mask, under a budget": Case(
        "reads this mask whole", "memory_budget takes its rows", _padded, _padded, changed=_LEAST
    ),
    "a mask that is given": Case(
        "is an input of the graph", "pass no attention mask", _with_a_mask, _causal, _LEAST
    ),
    "norms of all heads": Case(
        "every head needs all",
        "over the features of one head",
        lambda h=hidden: _attention(h, of_all=norm_of_all, is_causal=True),
        lambda h=hidden: _attention(h, of_a_head=norm_of_a_head, is_causal=True),
        _LEAST,
    ),
}
