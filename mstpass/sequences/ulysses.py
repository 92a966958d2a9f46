"""Ulysses: attention by heads, everything else by tokens.

Each of R ranks has s = S / R tokens of all H heads. An all-to-all gives it all S tokens of H / R
heads, for which it computes attention as one process would; a second one gives it back its tokens
of all heads. Both are traced, and their gradients are the same exchanges the other way round.

If the K key-value heads do not divide among the ranks, they are repeated as often as is needed, at
most once for each head.

In *groups of heads*, a rank computes attention for one group of its heads after the other
(groups_of_heads.py).

On a mesh of two dims, a row of ranks has a block of the sequence, and exchanges its heads. For
those a rank then attends to all blocks, which go round among the ranks of its column.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstpass.sequences.exchange_heads import to_heads, to_tokens
from mstpass.sequences.groups_of_heads import Groups, attention_in_groups
from mstpass.sequences.ranks import Ranks
from mstpass.sequences.ring import ring
from mstpass.sequences.rules import Rules
from mstpass.sequences.whole_attention import attend, for_each_head


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
    sinks = None if sinks_H is None else sinks_H.chunk(row.size)[row.rank]
    q_BRHsD, k_BRKsD, v_BRKsD = (_by_rank(x, row) for x in (query_BHsD, key_BKsD, value_BKsD))
    if groups > 1 and ranks.ring is None and not rules.dropout:
        how = groups, row, rules, documents_BS, sinks
        return attention_in_groups(q_BRHsD, k_BRKsD, v_BRKsD, *how).flatten(2, 3)
    heads = Groups.of(groups, k_BRKsD.shape[2])
    mixed: list[Tensor] = []
    kv: list[Tensor] = []
    for i, parts in enumerate(heads.parts([q_BRHsD], [k_BRKsD, v_BRKsD])):
        q, *new = to_heads(parts, row.name)
        kv = new or kv
        k, v = (heads.heads_of(x, i) for x in kv)
        sinks_h = None if sinks is None else sinks.chunk(groups)[i]
        out = _attend(q, k, v, ranks, rules, documents_BS, sinks_h)
        mixed.append(to_tokens(out, row.size, row.name))
    return (mixed[0] if groups == 1 else torch.cat(mixed, 3)).flatten(2, 3)


def _attend(
    q_BhSD: Tensor,
    k_BkSD: Tensor,
    v_BkSD: Tensor,
    ranks: Ranks,
    rules: Rules,
    documents_BS: Tensor | None,
    sinks_h: Tensor | None,
) -> Tensor:
    if ranks.ring is not None:
        return ring(q_BhSD, k_BkSD, v_BkSD, ranks.ring, rules).transpose(1, 2)
    return attend(q_BhSD, k_BkSD, v_BkSD, rules, documents_BS, sinks_h)


def _by_rank(x_BHsD: Tensor, ranks: Ranks) -> Tensor:
    """The heads of each rank, ``[B, R, h, s, D]``."""
    B, H, s, D = x_BHsD.shape
    return x_BHsD.reshape(B, ranks.size, H // ranks.size, s, D)


def copies_of_kv_heads(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is repeated, so that each rank has those of its heads."""
    groups = heads // kv_heads
    return next(
        copies
        for copies in range(1, groups + 1)
        if groups % copies == 0 and kv_heads * copies % ranks == 0
    )
