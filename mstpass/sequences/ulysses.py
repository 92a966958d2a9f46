"""Ulysses: attention by heads, everything else by tokens.

Each of R ranks has s = S / R tokens of all H heads. An all-to-all gives it all S tokens of H / R
heads, for which it computes attention as one process would; a second one gives it back its tokens
of all heads. Both are traced, and their gradients are the same exchanges the other way round.

If the K key-value heads do not divide among the ranks, they are repeated as often as is needed, at
most once for each head.

In *groups of heads*, the exchange, attention and the exchange back run for one group after the
other, so that the keys, queries and values of all S tokens exist for one group at a time. All ranks
have the same groups, and so the same collectives in the same order.

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
    queries = query_BHsD.chunk(groups, 1)
    keys, values = (_of_groups(x, len(queries)) for x in (key_BKsD, value_BKsD))
    sinks = [None] * len(queries) if sinks_H is None else sinks_H.chunk(groups)
    mixed = [
        _one_group(q, k, v, ranks, rules, documents_BS, sinks_h)
        for q, k, v, sinks_h in zip(queries, keys, values, sinks, strict=True)
    ]
    return mixed[0] if groups == 1 else torch.cat(mixed, 2)


def _of_groups(x_BKsD: Tensor, groups: int) -> tuple[Tensor, ...]:
    """The keys or values of each group of query heads; one head may be that of several groups."""
    kv_heads = x_BKsD.shape[1]
    if kv_heads % groups == 0:
        return x_BKsD.chunk(groups, 1)
    if groups % kv_heads == 0:
        return tuple(x for x in x_BKsD.split(1, 1) for _ in range(groups // kv_heads))
    return for_each_head(x_BKsD, math.lcm(kv_heads, groups)).chunk(groups, 1)


def _one_group(
    query_BHsD: Tensor,
    key_BKsD: Tensor,
    value_BKsD: Tensor,
    ranks: Ranks,
    rules: Rules,
    documents_BS: Tensor | None,
    sinks_H: Tensor | None,
) -> Tensor:
    row = ranks if ranks.row is None else ranks.row
    copies = copies_of_kv_heads(query_BHsD.shape[1], key_BKsD.shape[1], row.size)
    key_BKsD, value_BKsD = (for_each_head(x, x.shape[1] * copies) for x in (key_BKsD, value_BKsD))
    features = [x.shape[-1] for x in (query_BHsD, key_BKsD, value_BKsD)]
    q, k, v = (
        x[..., :own]
        for x, own in zip(_to_heads((query_BHsD, key_BKsD, value_BKsD), row), features, strict=True)
    )
    if ranks.ring is not None:
        return _to_tokens(ring(q, k, v, ranks.ring, rules).transpose(1, 2), row)
    sinks = None if sinks_H is None else sinks_H.chunk(row.size)[row.rank]
    return _to_tokens(attend(q, k, v, rules, documents_BS, sinks), row)


def copies_of_kv_heads(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is repeated, so that each rank has those of its heads."""
    groups = heads // kv_heads
    return next(
        copies
        for copies in range(1, groups + 1)
        if groups % copies == 0 and kv_heads * copies % ranks == 0
    )


def _to_heads(parts_BHsD: tuple[Tensor, ...], ranks: Ranks) -> tuple[Tensor, ...]:
    """All tokens of this rank's share of each part's heads, ``[B, h, S, D]``, in one exchange.

    D is that of the widest part.

    What is received is ``[R, s, B, h, D]``: all tokens in order, so that nothing is copied again.
    """
    B, _, s, _ = parts_BHsD[0].shape
    D = max(part.shape[-1] for part in parts_BHsD)  # of latent attention, values have fewer
    same_width = [F.pad(part, (0, D - part.shape[-1])) for part in parts_BHsD]
    by_rank = [part.reshape(B, ranks.size, -1, s, D) for part in same_width]
    sent = torch.cat(by_rank, dim=2).permute(1, 3, 0, 2, 4)
    received = all_to_all(sent, ranks.name).flatten(0, 1).permute(1, 2, 0, 3)
    return received.split([part.shape[2] for part in by_rank], dim=1)


def _to_tokens(x_BhSD: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of all heads, ``[B, s, H, D]``."""
    B, h, _, D = x_BhSD.shape
    sent = x_BhSD.permute(2, 0, 1, 3).reshape(ranks.size, -1, B, h, D)
    received = all_to_all(sent, ranks.name)  # [R, s, B, h, D]
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)
