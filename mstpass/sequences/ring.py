"""Ring attention: queries stay, keys and values go round.

Each of R ranks has s = S / R tokens of all heads. In step t, rank r has the keys and values of rank
r - t, and its queries attend to that block. What a query gets of two blocks, values o and o' with
log-sums l and l' of their scores, is merged exactly::

    L = log(exp(l) + exp(l'))        O = o exp(l - L) + o' exp(l' - L)

Under causal attention the own block has the causal flag, and blocks of later ranks are left out.
The exchanges are the same for all ranks, in the same order. So the last rank computes R blocks and
the first one 1: Ulysses, where the heads divide, gives all ranks the same work.

Backward sends keys, values and their gradients round together and needs of the forward the queries,
keys and values of this rank, O and L alone. What goes round in backward depends on the gradient, so
that no rewrite of a graph takes it for what went round in the forward and keeps S tokens of it.

Windows, documents, sinks, soft caps and dropout are not known here: kernels that return log-sums
take no mask.

Source: Liu et al., Ring Attention, arXiv 2310.01889.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mstpass.sequences.ranks import Ranks
from mstpass.sequences.rules import Rules
from mstpass.torch_internals.attention_blocks import attend_block, gradients_of_block
from mstpass.torch_internals.collectives import pass_on


def ring_takes(rules: Rules, heads: int, ranks: Ranks) -> None:
    """Refuse rules that ring attention does not know.

    Raises:
        ValueError: with the rule, and what to change.
    """
    given = {
        "a window": rules.window is not None,
        "documents or padding that need a mask": rules.documents_BS is not None,
        "sinks": rules.sinks_H is not None,
        "a soft cap": rules.softcap is not None,
        "dropout": rules.dropout > 0,
    }
    found = [name for name, is_given in given.items() if is_given]
    if found:
        size = ranks.size
        instead = (
            f"Ulysses takes {heads} heads on {size} ranks: leave method='ring' out"
            if ranks.ring is None and heads % size == 0
            else "Ulysses alone needs a number of ranks that divides the heads: "
            f"{heads} heads on {size} ranks. Take another number of ranks, or leave these out"
        )
        raise ValueError(
            f"attention has {', '.join(found)}, which ring attention does not know. {instead}"
        )


def ring(
    query_BHsD: Tensor, key_BKsD: Tensor, value_BKsD: Tensor, ranks: Ranks, rules: Rules
) -> Tensor:
    """This rank's tokens after attention to the whole sequence, ``[B, s, H, D]``."""
    scale, how = rules.scale_of(query_BHsD), (ranks.rank, ranks.size, ranks.name)
    mixed: Tensor = _Ring.apply(query_BHsD, key_BKsD, value_BKsD, rules.causal, scale, *how)
    return mixed.transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        scale: float,
        rank: int,
        size: int,
        group_name: str,
    ) -> Tensor:
        features = key.shape[-1]
        out, log_sum = attend_block(query, key, value, causal, scale)
        out = _cast(out, log_sum.dtype)
        block = torch.cat((key, value), -1)
        for step in range(1, size):
            block = pass_on(block, rank, size, group_name)
            if causal and step > rank:  # of a later rank
                continue
            k, v = _parts(block, features)
            more, its_log_sum = attend_block(query, k, v, False, scale)
            both = torch.logaddexp(log_sum, its_log_sum)
            out = out * _share(log_sum, both) + more.to(out.dtype) * _share(its_log_sum, both)
            log_sum = both
        if causal and rank < size - 1:
            out = _after(block, out, log_sum)
        out = _cast(out, query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.how = (causal, scale, rank, size, group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, log_sum = ctx.saved_tensors
        causal, scale, rank, size, group_name = ctx.how
        features, dtype = key.shape[-1], log_sum.dtype
        of_result = (grad.contiguous(), query, out, log_sum, scale)
        of_query, of_keys = _gradients(key, value, causal, *of_result)
        block = torch.cat((key, value), -1).to(dtype)
        for step in range(1, size):
            both = pass_on(torch.stack((block, of_keys)), rank, size, group_name)
            block, of_keys = both.unbind()
            if causal and step > rank:
                continue
            k, v = _parts(block.to(key.dtype), features)
            of_q, more = _gradients(k, v, False, *of_result)
            of_query, of_keys = of_query + of_q, of_keys + more
        if size > 1:
            of_keys = pass_on(of_keys, rank, size, group_name)  # home
        of_k, of_v = of_keys[..., :features], of_keys[..., features:]
        given = (of_query.to(query.dtype), of_k.to(key.dtype), of_v.to(value.dtype))
        return (*given, None, None, None, None, None)


def _gradients(
    key: Tensor,
    value: Tensor,
    causal: bool,
    grad: Tensor,
    query: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What a block adds to the queries' gradients, and those of its keys and values, joined."""
    of_q, of_k, of_v = gradients_of_block(grad, query, key, value, out, log_sum, causal, scale)
    return of_q.to(log_sum.dtype), torch.cat((of_k, of_v), -1).to(log_sum.dtype)


def _parts(block: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, for kernels."""
    return block[..., :features].contiguous(), block[..., features:].contiguous()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``. One that changes nothing loses the gradient in Dynamo of torch 2.11.

    There a custom function whose result is such an alias has a gradient of 0.
    """
    return x if x.dtype == dtype else x.to(dtype)


def _after(block: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    """``out``, computed after the exchange that brought a block which this rank does not read.

    Without a reader the exchange would have no place in the order of a graph, and ranks that read
    what they get might exchange in another order. The condition never holds.
    """
    never = log_sum.unsqueeze(-1) > math.inf
    return torch.where(never, block[:1, :1, :1, :1].to(out.dtype), out)


def _share(log_sum: Tensor, of_both: Tensor) -> Tensor:
    return (log_sum - of_both).exp().unsqueeze(-1)
