"""Write a mean over tokens as a sum divided by their number, because chunks can add up sums.

    mean(x, dims)  =  sum(x, dims) / n      n: the product of the sizes of the dims

If x has lower precision than float32, the sum is taken in float32 and rounded once after the
division, as in the mean. The backward of a mean needs no rewrite: it divides an expanded gradient
by n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.normalize.downstream import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR

aten = torch.ops.aten
prims = torch.ops.prims

_MEANS = (aten.mean.default, aten.mean.dim)
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def means_as_sums(joint: JointGraph) -> Rewritten:
    """Rewrite the means of wide values over tokens, in a copy of the graph.

    Returns:
        The copy and the names of the sums in it; the graph itself if it has no such mean.
    """
    return rewritten(joint, _means_over_tokens(joint), _replace_by_sum)


def _means_over_tokens(joint: JointGraph) -> Iterator[fx.Node]:
    """The means of wide values downstream of an anchor over all tokens, perhaps also other dims."""
    known = joint.cached(downstream)
    for node in joint.nodes:
        if node.target not in _MEANS or node in known:
            continue
        (source,) = node.all_input_nodes
        if source in known:
            spec, anchor = known[source]
            over_all_tokens = set(spec) <= set(reduced_dims(node, source.meta["val"].dim()))
            if over_all_tokens and numel(source) >= int(WIDE_OF_ANCHOR * numel(anchor)):
                yield node


def _replace_by_sum(rewriting: Rewriting, mean: fx.Node) -> fx.Node:
    """Add the sum and its quotient before the mean, and let the quotient replace the mean.

    Returns:
        The sum.
    """
    (operand,) = mean.all_input_nodes
    value, shape = mean.meta["val"], operand.meta["val"].shape
    dims = reduced_dims(mean, len(shape))
    keepdim = value.dim() == len(shape)
    dtype = torch.float32 if value.dtype in _LOW_PRECISION else value.dtype
    builder = rewriting.builder
    with rewriting.graph.inserting_before(mean):
        (count,) = rewriting.sizes.arguments([math.prod(shape[d] for d in dims)])
        total = builder.call(aten.sum.dim_IntList, operand, dims, keepdim, dtype=dtype)
        quotient = builder.call(aten.div.Tensor, total, count)
        if dtype != value.dtype:
            quotient = builder.call(prims.convert_element_type.default, quotient, value.dtype)
    for node in (total, quotient):
        node.meta.update(policy_meta(mean))
    rewriting.replace(mean, quotient)
    return total
