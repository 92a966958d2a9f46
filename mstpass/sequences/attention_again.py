"""Attention of one group of heads, which backward computes once more when it gets there.

Backward keeps the queries that this rank has, and the keys and values that it received, and sends
the queries again together with the gradient. So they depend on the gradient, and no rewrite of a
graph takes them for those of the forward: a plan that recomputes a layer as a whole would hold what
all groups received, from the layer's MLP to the last group.

Dynamo puts the function into its graph as it is, since backward asks autograd for the gradients of
an attention; AOTAutograd traces through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstpass.sequences.exchange_heads import to_heads, to_tokens
from mstpass.sequences.ranks import Ranks
from mstpass.sequences.rules import Rules
from mstpass.sequences.whole_attention import attend


def attention_again(
    query_BRhsD: Tensor,
    key_BkSD: Tensor,
    value_BkSD: Tensor,
    ranks: Ranks,
    rules: Rules,
    documents_BS: Tensor | None,
    sinks_h: Tensor | None,
) -> Tensor:
    """This rank's tokens of the heads of each rank, ``[B, s, R, h, D]``.

    Args:
        query_BRhsD: this rank's tokens, of the heads of each rank.
        key_BkSD: all tokens of this rank's heads.
        rules: without dropout, which would be another one in backward.
    """
    given = (query_BRhsD, key_BkSD, value_BkSD, documents_BS, sinks_h)
    how = (rules.causal, rules.scale_of(query_BRhsD), rules.window, rules.softcap)
    mixed: Tensor = _in_graph(*given, *how, ranks.size, ranks.name)
    return mixed


@torch.compiler.allow_in_graph
def _in_graph(*given: Any) -> Any:
    return _Again.apply(*given)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        sinks: Tensor | None,
        causal: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
        size: int,
        group_name: str,
    ) -> Tensor:
        rules = Rules(causal, scale, 0.0, window, softcap)
        ctx.save_for_backward(query, key, value, documents, sinks)
        ctx.how = rules, size, group_name
        (q,) = to_heads((query,), size, group_name)
        return to_tokens(attend(q, key, value, rules, documents, sinks), size, group_name)

    @staticmethod
    def backward(ctx: Any, grad_BsRhD: Tensor) -> Any:
        query, key, value, documents, sinks = ctx.saved_tensors
        rules, *ranks = ctx.how
        q, grad = to_heads((query, grad_BsRhD.permute(0, 2, 3, 1, 4)), *ranks)
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, key, value))
            own_sinks = None if sinks is None else sinks.detach().requires_grad_()
            mixed = attend(q, k, v, rules, documents, own_sinks)
            read = (q, k, v) if own_sinks is None else (q, k, v, own_sinks)
            of_q, of_key, of_value, *of_sinks = torch.autograd.grad(mixed, read, grad)
        of_query = to_tokens(of_q, *ranks).permute(0, 2, 3, 1, 4)
        of_sink = of_sinks[0] if of_sinks else None
        return (of_query, of_key, of_value, None, of_sink, *[None] * 6)
