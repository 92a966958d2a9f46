"""Ulysses: attention by heads, everything else by tokens.

Each of R ranks has s = S / R tokens of all H heads. An all-to-all gives it all S tokens of H / R
heads, for which it computes attention as one process would; a second one gives it back its tokens
of all heads. Both are traced, and their gradients are the same exchanges the other way round.

If the K key-value heads do not divide among the ranks, they are repeated as often as is needed, at
most once for each head.

In *groups of heads*, a rank computes attention for one group of its heads after the other, so that
the queries of all S tokens, and what is mixed for them, exist for one group at a time. Keys and
values are exchanged together with the first group that needs them. All ranks have the same groups,
and so the same collectives in the same order.

On a mesh of two dims, a row of ranks has a block of the sequence, and exchanges its heads. For
those a rank then attends to all blocks, which go round among the ranks of its column.

Sources: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509; Untied Ulysses, arXiv 2602.21196.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.sequences.ranks import Ranks
from mstpass.sequences.ring import ring
from mstpass.sequences.rules import Rules
from mstpass.sequences.whole_attention import attend, for_each_head
from mstpass.torch_internals.exchanges import all_to_all


def heads_divide(heads: int, ranks: int, groups: int = 1) -> bool:
    """Whether each rank gets the same number of heads of each group."""
    return heads % (ranks * groups) == 0


def ulysses(
    query_BHsD: Tensor,
    key_BKsD: Tensor,
    value_BKsD: Tensor,
    ranks: Ranks,
    rules: Rules,
    documents_BS: Tensor | None = None,
    sinks_H: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    """This rank's tokens after attention to the whole sequence, ``[B, s, H, D]``.

    Args:
        documents_BS: of the whole sequence.
        sinks_H: of all heads.
        groups: of heads, one after the other.
    """
    row = ranks if ranks.row is None else ranks.row
    copies = copies_of_kv_heads(query_BHsD.shape[1], key_BKsD.shape[1], row.size)
    key_BKsD, value_BKsD = (for_each_head(x, x.shape[1] * copies) for x in (key_BKsD, value_BKsD))
    kv_groups = math.gcd(groups, key_BKsD.shape[1] // row.size)
    queries = _by_group(query_BHsD, row, groups)
    keys, values = (_by_group(x, row, kv_groups) for x in (key_BKsD, value_BKsD))
    sinks = None if sinks_H is None else sinks_H.chunk(row.size)[row.rank].chunk(groups)
    sharing = groups // kv_groups  # groups of queries that have the same keys and values
    mixed = []
    for i, q in enumerate(queries):
        if i % sharing == 0:
            q, *kv = _to_heads((q, keys[i // sharing], values[i // sharing]), row)
        else:
            (q,) = _to_heads((q,), row)
        k, v = (_of_group(x, i % sharing, sharing) for x in kv)
        if ranks.ring is not None:
            mixed_BhSD = ring(q, k, v, ranks.ring, rules).transpose(1, 2)
        else:
            mixed_BhSD = attend(q, k, v, rules, documents_BS, None if sinks is None else sinks[i])
        mixed.append(_to_tokens(mixed_BhSD, row))
    return torch.cat(mixed, 3).flatten(2, 3)


def _by_group(x_BHsD: Tensor, ranks: Ranks, groups: int) -> tuple[Tensor, ...]:
    """Of each group, the heads of each rank, ``[B, R, h, s, D]``."""
    B, H, s, D = x_BHsD.shape
    return x_BHsD.reshape(B, ranks.size, H // ranks.size, s, D).chunk(groups, 2)


def _of_group(x_BKSD: Tensor, i: int, sharing: int) -> Tensor:
    """The keys or values of the i-th of several groups of query heads that share these heads."""
    if sharing == 1 or x_BKSD.shape[1] == 1:
        return x_BKSD
    return for_each_head(x_BKSD, math.lcm(x_BKSD.shape[1], sharing)).chunk(sharing, 1)[i]


def copies_of_kv_heads(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is repeated, so that each rank has those of its heads."""
    groups = heads // kv_heads
    return next(
        copies
        for copies in range(1, groups + 1)
        if groups % copies == 0 and kv_heads * copies % ranks == 0
    )


def _to_heads(parts_BRhsD: tuple[Tensor, ...], ranks: Ranks) -> list[Tensor]:
    """All tokens of this rank's heads of each part, ``[B, h, S, D]``, in one exchange.

    What is received is ``[R, s, B, h, D]``: all tokens in order, so that nothing is copied again.
    """
    features = [part.shape[-1] for part in parts_BRhsD]  # of latent attention, values have fewer
    same_width = [F.pad(part, (0, max(features) - part.shape[-1])) for part in parts_BRhsD]
    sent = torch.cat(same_width, dim=2).permute(1, 3, 0, 2, 4)
    received = all_to_all(sent, ranks.name).flatten(0, 1).permute(1, 2, 0, 3)
    parts = received.split([part.shape[2] for part in parts_BRhsD], dim=1)
    return [part[..., :own] for part, own in zip(parts, features, strict=True)]


def _to_tokens(x_BhSD: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, h, D]``."""
    B, h, _, D = x_BhSD.shape
    sent = x_BhSD.permute(2, 0, 1, 3).reshape(ranks.size, -1, B, h, D)
    received = all_to_all(sent, ranks.name)  # [R, s, B, h, D]
    return received.permute(2, 1, 0, 3, 4)
