"""Write means over tokens as scaled sums, which chunks can add up.

    mean(x, dims)  =  sum(x, dims) / n      n: the product of the dims' sizes

The sum is taken in float32 where x is of lower precision, and rounded once, as the mean's is. The
backward of a mean divides a gradient that is expanded by n: nothing is to be changed there.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import fx

from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.normalize.downstream import downstream

aten = torch.ops.aten
prims = torch.ops.prims

_MEANS = (aten.mean.default, aten.mean.dim)
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_WIDE_OF_ANCHOR = 0.4


def means_as_sums(joint: JointGraph) -> tuple[JointGraph, frozenset[str]]:
    """A new joint graph with such means of wide values as sums, and the names of the sums.

    The same graph where there are none.
    """
    found = _means_over_tokens(joint)
    if not found:
        return joint, frozenset()
    new = joint.copy()
    builder = Builder(new.module.graph, fake_mode_of(new.nodes))
    sizes = SizeNodes(builder)
    for node in new.module.graph.find_nodes(op="placeholder"):
        sizes.learn(node)
    sums = set()
    for name in found:
        with contextlib.suppress(UnknownSize):
            sums.add(_write(builder, sizes, new.by_name[name]).name)
    new.module.graph.eliminate_dead_code()
    new.module.graph.lint()
    new.module.recompile()
    return JointGraph(new.module, new.num_fwd_outputs), frozenset(sums)


def _means_over_tokens(joint: JointGraph) -> list[str]:
    """Means, over all tokens and maybe more dims, of wide values downstream of wide matmuls."""
    known = joint.cached(downstream)
    found = []
    for node in joint.nodes:
        if node.target not in _MEANS or node in known:
            continue
        (source,) = node.all_input_nodes
        if source in known:
            spec, anchor = known[source]
            every = set(spec) <= set(reduced_dims(node, source.meta["val"].dim()))
            if every and numel(source) >= int(_WIDE_OF_ANCHOR * numel(anchor)):
                found.append(node.name)
    return found


def _write(builder: Builder, sizes: SizeNodes, mean: fx.Node) -> fx.Node:
    """The sum of a mean, before it; its quotient takes the mean's place."""
    (operand,) = mean.all_input_nodes
    value, shape = mean.meta["val"], operand.meta["val"].shape
    dims = reduced_dims(mean, len(shape))
    keep = value.dim() == len(shape)
    dtype = torch.float32 if value.dtype in _LOW_PRECISION else value.dtype
    with builder.graph.inserting_before(mean):
        (count,) = sizes.arguments([math.prod(shape[d] for d in dims)])
        total = builder.call(aten.sum.dim_IntList, operand, dims, keep, dtype=dtype)
        quotient = builder.call(aten.div.Tensor, total, count)
        if dtype != value.dtype:
            quotient = builder.call(prims.convert_element_type.default, quotient, value.dtype)
    for node in (total, quotient):
        node.meta.update(policy_meta(mean))
    mean.replace_all_uses_with(quotient)
    return total
