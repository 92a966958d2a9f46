"""The two exchanges of Ulysses: tokens of all heads for all tokens of some heads, and back.

Shapes: R ranks with s tokens each, S in all; h heads of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.torch_internals.exchanges import all_to_all


def to_heads(parts_BRhsD: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """All tokens of this rank's heads of each part, ``[B, h, S, D]``, in one exchange."""
    return heads_received(all_to_all(heads_sent(parts_BRhsD), group_name), parts_BRhsD)


def to_tokens(x_BhSD: Tensor, ranks: int, group_name: str) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, h, D]``."""
    return tokens_received(all_to_all(tokens_sent(x_BhSD, ranks), group_name))


def heads_sent(parts_BRhsD: Sequence[Tensor]) -> Tensor:
    """What each rank gets of all parts, ``[R, s, B, h, D]``."""
    widest = max(part.shape[-1] for part in parts_BRhsD)  # of latent attention, values have fewer
    same_width = [
        part if part.shape[-1] == widest else F.pad(part, (0, widest - part.shape[-1]))
        for part in parts_BRhsD
    ]
    # one after the other in the order in which they are sent: no copy of all parts besides
    return torch.cat([part.permute(1, 3, 0, 2, 4) for part in same_width], dim=3).contiguous()


def heads_received(x_RsBhD: Tensor, parts_BRhsD: Sequence[Tensor]) -> list[Tensor]:
    """All tokens of each part: they come in order, so that nothing is copied again."""
    x_BhSD = x_RsBhD.flatten(0, 1).permute(1, 2, 0, 3)
    parts = x_BhSD.split([part.shape[2] for part in parts_BRhsD], dim=1)
    return [x[..., : part.shape[-1]] for x, part in zip(parts, parts_BRhsD, strict=True)]


def tokens_sent(x_BhSD: Tensor, ranks: int) -> Tensor:
    """Of this rank's heads the tokens of each rank, ``[R, s, B, h, D]``."""
    B, h, _, D = x_BhSD.shape
    return x_BhSD.permute(2, 0, 1, 3).reshape(ranks, -1, B, h, D)


def tokens_received(x_RsBhD: Tensor) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, h, D]``."""
    return x_RsBhD.permute(2, 1, 0, 3, 4)
