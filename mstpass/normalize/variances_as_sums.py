"""Write a variance over tokens as a sum of squares, because chunks can add up sums.

    var(x, dims)  =  sum((x - mean(x, dims))^2, dims) / (n - c)

with n elements and the correction c.

The mean is a sum as well (means_as_sums.py). A loop finds it first, the next one the squares: as
exact as the variance itself, which a sum of x^2 would not be. If x has lower precision than
float32, both are taken in float32. The backward of a variance needs no rewrite: it reads the mean.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import argument
from mstpass.normalize.downstream import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR

aten = torch.ops.aten
prims = torch.ops.prims

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def variances_as_sums(joint: JointGraph) -> Rewritten:
    """Rewrite the variances of wide values over tokens, in a copy of the graph.

    Returns:
        The copy and the names of the sums in it; the graph itself if it has no such variance.
    """
    found = (node for node in joint.nodes if _is_over_tokens(joint, node))
    return rewritten(joint, found, _replace)


def _is_over_tokens(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node is the variance of a wide value over all tokens, perhaps with its mean."""
    if node.target not in (aten.var.correction, aten.var_mean.correction):
        return False
    (source,) = node.all_input_nodes
    known = joint.cached(downstream)
    if source not in known:
        return False
    spec, anchor = known[source]
    dims = reduced_dims(node, source.meta["val"].dim())
    return set(spec) <= set(dims) and numel(source) >= int(WIDE_OF_ANCHOR * numel(anchor))


def _replace(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    """Add the mean, the squares and their sum before the node. Returns the sum."""
    (operand,) = node.all_input_nodes
    value, call = operand.meta["val"], rewriting.builder.call
    dims, correction = reduced_dims(node, value.dim()), argument(node, "correction")
    keepdim = bool(argument(node, "keepdim"))
    with rewriting.graph.inserting_before(node):
        (count,) = rewriting.sizes.arguments([math.prod(value.shape[d] for d in dims)])
        divisor = _less(rewriting, count, 1 if correction is None else correction)
        values = operand
        if value.dtype in _LOW_PRECISION:
            values = call(prims.convert_element_type.default, operand, torch.float32)
        mean = call(aten.mean.dim, values, dims, True)
        shifted = call(aten.sub.Tensor, values, mean)
        squares = call(aten.mul.Tensor, shifted, shifted)
        total = call(aten.sum.dim_IntList, squares, dims, keepdim)
        results = [call(aten.div.Tensor, total, divisor)]
        results.append(mean if keepdim else call(aten.squeeze.dims, mean, dims))
        if values is not operand:
            results = [call(prims.convert_element_type.default, n, value.dtype) for n in results]
    if node.target is aten.var.correction:
        rewriting.replace(node, results[0])
    else:
        for item in list(node.users):
            rewriting.replace(item, results[item.args[1]])  # type: ignore[index]
    return total


def _less(rewriting: Rewriting, count: Any, correction: float) -> Any:
    """``count - correction``; as of the variance, not below zero where the count is known."""
    if isinstance(count, fx.Node):
        return rewriting.builder.call(operator.sub, count, correction)
    return max(count - correction, 0)
