"""Attention of a rank's heads in groups, one after the other.

The queries of all S tokens, and what is mixed for them, exist for one group at a time; keys and
values come with the first group that needs them. While a group computes its attention, the queries
of the next one are on their way, and so is the result of the one before. All ranks have the same
groups, and so the same exchanges in the same order::

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
from torch import Tensor

from mstpass.sequences.exchange_heads import (
    heads_received,
    heads_sent,
    tokens_received,
    tokens_sent,
)
from mstpass.sequences.ranks import Ranks
from mstpass.sequences.rules import Rules
from mstpass.sequences.whole_attention import attend, for_each_head
from mstpass.torch_internals.exchanges import begin_all_to_all, wait


def attention_in_groups(
    query_BRHsD: Tensor,
    key_BRKsD: Tensor,
    value_BRKsD: Tensor,
    groups: int,
    ranks: Ranks,
    rules: Rules,
    documents_BS: Tensor | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, H, D]``.

    Args:
        query_BRHsD: this rank's tokens, of the H heads of each rank.
        rules: without dropout, which would be another one in backward.
        sinks_H: of this rank's heads.
    """
    given = (query_BRHsD, key_BRKsD, value_BRKsD, documents_BS, sinks_H)
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
            sinks_h = None if sinks is None else sinks.chunk(number)[i]
            exchanges.send_back(attend(q, k, v, rules, documents, sinks_h), mixed)
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
                mixed = attend(read[0], k, v, rules, documents, *read[3:])
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
