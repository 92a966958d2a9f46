"""Ulysses: attention by heads, everything else by tokens.

Each of R ranks has s = S / R tokens of all H heads. An all-to-all gives it all S tokens of H / R
heads, for which it computes attention as one process would; a second one gives it back its tokens
of all heads. Both are traced, and their gradients are the same exchanges the other way round.

If the K key-value heads do not divide among the ranks, they are repeated as often as is needed, at
most once for each head.

In *groups of heads*, a rank computes attention for one group of its heads after the other
(``groups_of_heads``).

On a mesh of two dims, a row of ranks has a block of the sequence, and exchanges its heads. For
those a rank then attends to all blocks, which go round among the ranks of its column.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.

**The two exchanges**: tokens of all heads for all tokens of some heads, and back. Shapes: R ranks
with s tokens each, S in all; h heads of each rank.

**Groups of heads**, one after the other. The queries of all S tokens, and what is mixed for them,
exist for one group at a time; keys and values come with the first group that needs them. While a
group computes its attention, the queries of the next one are on their way, and so is the result of
the one before. All ranks have the same groups, and so the same exchanges in the same order::

    send 0                            group i: send i + 1, wait for i, attention, send its result
    for each group i: as here         wait for the result of i - 1

Backward keeps this rank's tokens alone. It sends queries, keys and values again, together with the
gradient, and computes the group's attention once more. So they depend on the gradient, and no
rewrite of a graph takes them for those of the forward: a plan that recomputes a layer as a whole
would hold what all groups received, from the layer's MLP to the last group.

Dynamo puts the function into its graph as it is, since backward asks autograd for the gradients of
an attention; AOTAutograd traces through it.

Source of the groups: Untied Ulysses, arXiv 2602.21196.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.sequences.ranks import Ranks
from mstpass.sequences.ring import ring
from mstpass.sequences.rules import Rules, attend, for_each_head
from mstpass.torch_internals.collectives import all_to_all, begin_all_to_all, wait


def heads_divide(heads: int, ranks: int, groups: int = 1) -> bool:
    """Whether each rank gets the same number of heads of each group."""
    return heads % (ranks * groups) == 0


def ulysses(
    query_BHsD: Tensor,
    key_BKsD: Tensor,
    value_BKsD: Tensor,
    ranks: Ranks,
    rules: Rules,
    groups: int = 1,
) -> Tensor:
    """This rank's tokens after attention to the whole sequence, ``[B, s, H, D]``.

    Args:
        rules: with the sinks of all heads.
        groups: of heads, one after the other.
    """
    row = ranks if ranks.row is None else ranks.row
    copies = copies_of_kv_heads(query_BHsD.shape[1], key_BKsD.shape[1], row.size)
    key_BKsD, value_BKsD = (for_each_head(x, x.shape[1] * copies) for x in (key_BKsD, value_BKsD))
    rules = rules.of(rules.documents_BS, _part_of(rules.sinks_H, row.size, row.rank))
    q_BRHsD, k_BRKsD, v_BRKsD = (_by_rank(x, row) for x in (query_BHsD, key_BKsD, value_BKsD))
    if groups > 1 and ranks.ring is None and not rules.dropout:
        return attention_in_groups(q_BRHsD, k_BRKsD, v_BRKsD, groups, row, rules).flatten(2, 3)
    heads = Groups.of(groups, k_BRKsD.shape[2])
    mixed: list[Tensor] = []
    kv: list[Tensor] = []
    for i, parts in enumerate(heads.parts([q_BRHsD], [k_BRKsD, v_BRKsD])):
        q, *new = to_heads(parts, row.name)
        kv = new or kv
        k, v = (heads.heads_of(x, i) for x in kv)
        of_group = rules.of(rules.documents_BS, _part_of(rules.sinks_H, groups, i))
        if ranks.ring is None:
            out = attend(q, k, v, of_group)
        else:
            out = ring(q, k, v, ranks.ring, of_group).transpose(1, 2)
        mixed.append(to_tokens(out, row.size, row.name))
    return (mixed[0] if groups == 1 else torch.cat(mixed, 3)).flatten(2, 3)


def _part_of(sinks: Tensor | None, parts: int, i: int) -> Tensor | None:
    return None if sinks is None else sinks.chunk(parts)[i]


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


def attention_in_groups(
    query_BRHsD: Tensor,
    key_BRKsD: Tensor,
    value_BRKsD: Tensor,
    groups: int,
    ranks: Ranks,
    rules: Rules,
) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, H, D]``.

    Args:
        query_BRHsD: this rank's tokens, of the H heads of each rank.
        rules: without dropout, which would be another one in backward; the sinks are those of this
            rank's heads.
    """
    given = (query_BRHsD, key_BRKsD, value_BRKsD, rules.documents_BS, rules.sinks_H)
    how = (rules.causal, rules.scale_of(query_BRHsD), rules.window, rules.softcap)
    mixed: Tensor = _in_graph(*given, *how, groups, ranks.size, ranks.name)
    return mixed


@torch.compiler.allow_in_graph
def _in_graph(*given: Any) -> Any:
    return _Groups.apply(*given)


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the heads of a rank divide.

    Attributes:
        number: groups of query heads.
        of_keys: groups of key-value heads, each of which serves as many groups of query heads.
    """

    number: int
    of_keys: int

    @classmethod
    def of(cls, number: int, kv_heads: int) -> Groups:
        return cls(number, math.gcd(number, kv_heads))

    @property
    def sharing(self) -> int:
        """Groups of query heads that have the same keys and values."""
        return self.number // self.of_keys

    def parts(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each group what is sent: keys and values with the first one that needs them."""
        by_query = [x.chunk(self.number, 2) for x in of_queries]
        by_key = [x.chunk(self.of_keys, 2) for x in of_keys]
        return [
            [
                *(x[i] for x in by_query),
                *(x[i // self.sharing] for x in by_key if i % self.sharing == 0),
            ]
            for i in range(self.number)
        ]

    def heads_of(self, x_BKSD: Tensor, i: int) -> Tensor:
        """The keys or values of group i, of those that it shares with others."""
        if self.sharing == 1 or x_BKSD.shape[1] == 1:
            return x_BKSD
        heads = math.lcm(x_BKSD.shape[1], self.sharing)
        return for_each_head(x_BKSD, heads).chunk(self.sharing, 1)[i % self.sharing]


class _Exchanges:
    """The exchanges of all groups, of which each is on its way while a group computes.

    Args:
        parts: what is sent of each group, ``[B, R, h, s, D]`` each.
    """

    def __init__(self, parts: Sequence[Sequence[Tensor]], size: int, group_name: str):
        self._parts, self._size, self._name = parts, size, group_name
        self._on_its_way = self._begin(0)
        self._last: list[Tensor] = []

    def _begin(self, i: int) -> Tensor:
        return begin_all_to_all(heads_sent(self._parts[i]), self._size, self._name)

    def received(self, i: int) -> list[Tensor]:
        """All tokens of the parts of group i; those of the next one are sent first."""
        pending = self._on_its_way
        if i + 1 < len(self._parts):
            self._on_its_way = self._begin(i + 1)
        return heads_received(wait(pending), self._parts[i])

    def send_back(self, x_BhSD: Tensor, into: list[Tensor]) -> None:
        """Add to a list what is sent back, which `finish` completes, or the next call."""
        self.finish()
        sent = tokens_sent(x_BhSD, self._size)
        into.append(begin_all_to_all(sent, self._size, self._name))
        self._last = into

    def finish(self) -> None:
        if self._last:
            self._last[-1] = wait(self._last[-1])
            self._last = []


class _Groups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, documents, sinks, *how = given
        causal, scale, window, softcap, number, size, group_name = how
        groups, rules = Groups.of(number, key.shape[2]), Rules(causal, scale, 0.0, window, softcap)
        ctx.save_for_backward(query, key, value, documents, sinks)
        ctx.how = groups, rules, size, group_name
        exchanges = _Exchanges(groups.parts([query], [key, value]), size, group_name)
        mixed: list[Tensor] = []
        kv: list[Tensor] = []
        for i in range(number):
            q, *new = exchanges.received(i)
            kv = new or kv
            k, v = (groups.heads_of(x, i) for x in kv)
            of_group = rules.of(documents, _part_of(sinks, number, i))
            exchanges.send_back(attend(q, k, v, of_group), mixed)
        exchanges.finish()
        return _joined(mixed)

    @staticmethod
    def backward(ctx: Any, grad_BsRHD: Tensor) -> Any:
        query, key, value, documents, sinks = ctx.saved_tensors
        groups, rules, size, group_name = ctx.how
        sent = groups.parts([query, grad_BsRHD.permute(0, 2, 3, 1, 4)], [key, value])
        exchanges = _Exchanges(sent, size, group_name)
        of_query: list[Tensor] = []
        of_key: list[Tensor] = []
        of_value: list[Tensor] = []
        of_sinks: list[Tensor] = []
        kv: list[Tensor] = []
        sums: list[Tensor] = []
        for i in range(groups.number):
            q, grad, *new = exchanges.received(i)
            kv, sums = (new, []) if new else (kv, sums)
            sinks_h = [] if sinks is None else [sinks.chunk(groups.number)[i]]
            with torch.enable_grad():
                read = [x.detach().requires_grad_() for x in (q, *kv, *sinks_h)]
                k, v = (groups.heads_of(x, i) for x in read[1:3])
                of_group = rules.of(documents, next(iter(read[3:]), None))
                mixed = attend(read[0], k, v, of_group)
            of_q, *of_kv = torch.autograd.grad(mixed, read, grad)
            of_sinks += of_kv[2:]
            sums = [a + b for a, b in zip(sums, of_kv[:2], strict=True)] if sums else of_kv[:2]
            exchanges.send_back(of_q, of_query)
            if (i + 1) % groups.sharing == 0:
                exchanges.send_back(sums[0], of_key)
                exchanges.send_back(sums[1], of_value)
        exchanges.finish()
        gradients = (_joined(x).permute(0, 2, 3, 1, 4) for x in (of_query, of_key, of_value))
        return (*gradients, None, torch.cat(of_sinks) if of_sinks else None, *[None] * 7)


def _joined(received: Sequence[Tensor]) -> Tensor:
    """This rank's tokens of the heads of all groups, ``[B, s, R, H, D]``."""
    return torch.cat([tokens_received(x) for x in received], 3)
