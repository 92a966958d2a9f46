"""The two exchanges of Ulysses: tokens of all heads for all tokens of some heads, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.torch_internals.exchanges import all_to_all


def to_heads(parts_BRhsD: tuple[Tensor, ...], ranks: int, group_name: str) -> list[Tensor]:
    """All tokens of this rank's heads of each part, ``[B, h, S, D]``, in one exchange.

    What is received is ``[R, s, B, h, D]``: all tokens in order, so that nothing is copied again.
    """
    features = [part.shape[-1] for part in parts_BRhsD]  # of latent attention, values have fewer
    widest = max(features)
    same_width = [
        part if part.shape[-1] == widest else F.pad(part, (0, widest - part.shape[-1]))
        for part in parts_BRhsD
    ]
    sent = torch.cat(same_width, dim=2).permute(1, 3, 0, 2, 4)
    received = all_to_all(sent, group_name).flatten(0, 1).permute(1, 2, 0, 3)
    parts = received.split([part.shape[2] for part in parts_BRhsD], dim=1)
    return [part[..., :own] for part, own in zip(parts, features, strict=True)]


def to_tokens(x_BhSD: Tensor, ranks: int, group_name: str) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, h, D]``."""
    B, h, _, D = x_BhSD.shape
    sent = x_BhSD.permute(2, 0, 1, 3).reshape(ranks, -1, B, h, D)
    received = all_to_all(sent, group_name)  # [R, s, B, h, D]
    return received.permute(2, 1, 0, 3, 4)
