"""What attention does beside a softmax of products: which keys a query sees, and how it scales.

A query at place i of the sequence sees the key at place j if all of these hold:

- ``causal``: j <= i;
- ``window`` w: i - j < w, and j - i < w where attention is not causal;
- ``documents``: both tokens have the same number. Padding has a number of its own, so each token
  sees itself at least, and no row of the softmax is empty.

Places are those in the whole sequence, not positions: a document's tokens are neighbors.

**Attention of all queries** of a sequence to all of its keys, for some of the heads. torch's
scaled_dot_product_attention takes scaling, dropout, and a causal flag or a mask. Two rules that it
lacks:

**Sinks** (GPT-OSS): each head has a score for a key that is not there, of value 0; it takes its
share of the softmax. Here that key is there: place 0 has a key that is 1 in one feature more, in
which all other keys are 0 and each query of head h is sink_h / scale. So its score is sink_h for
every query, and the kernels that need no S x S scores can be used. A query at place 0, whose result
is dropped, keeps the causal flag right.

**Soft caps** (Gemma 2) change the scores, so here they exist: in float32, as in transformers.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1  # the document of tokens that are none


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """The rules of an attention, with the scale 1 / sqrt(D) where none is given.

    Attributes:
        dropout: of probabilities.
        softcap: scores s become ``softcap * tanh(s / softcap)``.
        documents_BS: of the whole sequence.
        sinks_H: of the heads of the queries.
    """

    causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    documents_BS: Tensor | None = None
    sinks_H: Tensor | None = None

    def of(self, documents_BS: Tensor | None, sinks_H: Tensor | None) -> Rules:
        """The same for other documents and heads."""
        same = self.causal, self.scale, self.dropout, self.window, self.softcap
        return Rules(*same, documents_BS, sinks_H)

    def scale_of(self, query: Tensor) -> float:
        """The scale of the scores of these queries, whose last dim is D."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


def mask_of(rules: Rules, query_BHSD: Tensor) -> Tensor | None:
    """Which keys each query sees, ``bool [B or 1, 1, S, S]``; None where ``causal`` says it all."""
    tokens = query_BHSD.shape[2]
    windowed = rules.window is not None and rules.window < tokens
    documents_BS = rules.documents_BS
    if documents_BS is None and not windowed:
        return None
    place = torch.arange(tokens, device=query_BHSD.device)
    seen = []
    before = place[:, None] - place[None, :]
    if rules.causal:
        seen.append((before >= 0)[None, None])
    if windowed:
        assert rules.window is not None, "the window is known"
        distance = before if rules.causal else before.abs()
        seen.append((distance < rules.window)[None, None])
    if documents_BS is not None:
        seen.append(documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
    mask = seen[0]
    for rule in seen[1:]:
        mask = mask & rule
    return mask


_MORE_FEATURES = 8  # kernels want a multiple of it


def attend(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rules: Rules) -> Tensor:
    """The mixed values ``[B, H, S, D]``; K key-value heads serve H / K heads each.

    Raises:
        ValueError: soft caps together with sinks.
    """
    mask = mask_of(rules, query_BHSD)
    if rules.softcap is not None:
        if rules.sinks_H is not None:
            raise ValueError(
                "attention has a soft cap and sinks, and no order of the two is known: use one"
            )
        return _capped(query_BHSD, key_BKSD, value_BKSD, rules, mask)
    if rules.sinks_H is not None:
        return _with_sinks(query_BHSD, key_BKSD, value_BKSD, rules, mask, rules.sinks_H)
    return _plain(query_BHSD, key_BKSD, value_BKSD, rules, mask)


def _plain(q: Tensor, k: Tensor, v: Tensor, rules: Rules, mask: Tensor | None) -> Tensor:
    # Kernels of CUDA take a mask or grouped heads, not both. Of one key-value head, a view of all
    # heads costs nothing.
    grouped = k.shape[1] not in (1, q.shape[1]) and mask is None
    if not grouped:
        k, v = for_each_head(k, q.shape[1]), for_each_head(v, q.shape[1])
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=rules.dropout,
        is_causal=rules.causal and mask is None,
        scale=rules.scale_of(q),
        enable_gqa=grouped,
    )


def for_each_head(x_BKSD: Tensor, heads: int) -> Tensor:
    """Keys or values for each of the heads, ``[B, H, S, D]``."""
    kv_heads = x_BKSD.shape[1]
    if kv_heads == heads:
        return x_BKSD
    return x_BKSD.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, mask: Tensor | None, sinks_H: Tensor
) -> Tensor:
    features, scale = q.shape[-1], rules.scale_of(q)
    sink_BHS1 = (sinks_H / scale).to(q.dtype)[None, :, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat((q, sink_BHS1), -1), (0, _MORE_FEATURES - 1, 1, 0))
    k = F.pad(k, (0, _MORE_FEATURES))
    is_sink = torch.arange(k.shape[-1], device=k.device) == features
    k = torch.cat((is_sink.to(k.dtype).expand(*k.shape[:2], 1, -1), k), 2)
    v = F.pad(v, (0, _MORE_FEATURES, 1, 0))
    if mask is not None:
        mask = F.pad(mask, (1, 0, 1, 0), value=True)
    scaled = Rules(rules.causal, scale, rules.dropout)
    return _plain(q, k, v, scaled, mask)[:, :, 1:, : v.shape[-1] - _MORE_FEATURES]


def _capped(q: Tensor, k: Tensor, v: Tensor, rules: Rules, mask: Tensor | None) -> Tensor:
    assert rules.softcap is not None, "the softcap is known"
    k, v = for_each_head(k, q.shape[1]), for_each_head(v, q.shape[1])
    scores = (q @ k.transpose(2, 3)) * rules.scale_of(q)
    scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if mask is None and rules.causal:
        place = torch.arange(q.shape[2], device=q.device)
        mask = place[:, None] >= place[None, :]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    shares = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return F.dropout(shares, rules.dropout) @ v
