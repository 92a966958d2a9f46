"""What attention does beside a softmax of products: which keys a query sees, and how it scales.

A query at place i of the sequence sees the key at place j if all of these hold:

- ``causal``: j <= i;
- ``window`` w: i - j < w, and j - i < w where attention is not causal;
- ``documents``: both tokens have the same number. Padding has a number of its own, so each token
  sees itself at least, and no row of the softmax is empty.

Places are those in the whole sequence, not positions: a document's tokens are neighbors.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

PADDING = -1  # the document of tokens that are none


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of an attention, with the scale 1 / sqrt(D) where none is given.

    Attributes:
        dropout: of probabilities.
        softcap: scores s become ``softcap * tanh(s / softcap)``.
    """

    causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None

    def scale_of(self, query: Tensor) -> float:
        """The scale of the scores of these queries, whose last dim is D."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


def mask_of(rules: Rules, documents_BS: Tensor | None, query_BHSD: Tensor) -> Tensor | None:
    """Which keys each query sees, ``bool [B or 1, 1, S, S]``; None where ``causal`` says it all."""
    tokens = query_BHSD.shape[2]
    windowed = rules.window is not None and rules.window < tokens
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
