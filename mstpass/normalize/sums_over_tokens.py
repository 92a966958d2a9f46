"""Sums, and choices, that loops over tokens, or over sections, can make of their chunks.

Means, variances and softmaxes over tokens are written as sums, which chunks can add up.

``means_as_sums``: a mean is a sum divided by the number of tokens.

    mean(x, dims)  =  sum(x, dims) / n      n: the product of the sizes of the dims

If x has lower precision than float32, the sum is taken in float32 and rounded once after the
division, as in the mean. The backward of a mean needs no rewrite: it divides an expanded gradient
by n.

``variances_as_sums``: a variance is a sum of squares.

    var(x, dims)  =  sum((x - mean(x, dims))^2, dims) / (n - c)

with n elements and the correction c.

The mean is a sum as well. A loop finds it first, the next one the squares: as
exact as the variance itself, which a sum of x^2 would not be. If x has lower precision than
float32, both are taken in float32. The backward of a variance needs no rewrite: it reads the mean.

``local_sums``: a softmax over shards sums its exponentials before it knows the maximum of all.

Each rank has some of the columns of x. A softmax over all of them subtracts the maximum M of all
ranks and adds up the sums of all ranks::

    m = amax(x);   M = all_reduce(m, max);   s = sum(exp(x - M));   S = all_reduce(s, sum)

So x is needed before the first collective, between the two and after them: three times, if it
exists only in chunks. The same sum, with the rank's own maximum::

    s = sum(exp(x - m)) exp(m - M)

needs x no later than m. A row that is ``-inf`` everywhere has s = 0 as before. The new form rounds
otherwise, within a few units of the last place.

``row_sums_of_gradients``: the sum of a gradient over a row of the vocabulary is made of sums that
the forward knows.

The gradient of a log-softmax reads the sum of each row of the gradient that enters it. Let that
gradient be a sum of products, each of a factor r with one element per row, which the backward
brings, and a value w that only depends on the forward::

    sum over v of (r1 w1[v] + r2 w2[v] + ...)  =  r1 sum(w1) + r2 sum(w2) + ...

The sums of w are found where the forward has the row at hand. What is left reads one number per
row, so that a loop over sections of the vocabulary needs no other section (loops/sections.py). Some
sums have a closed form (graph/row_sums.py): that of a label's gradient is its one element.

Gathers and scatters of few elements per row become choices and sums in the order of the rows.

``scattered_gradients_as_choices``: a scatter into zeros becomes choices, in the rows' order::

    scatter_add(zeros, dim, index, gradient)  ->  sum of where(iota == index[k], gradient[k], 0)

It is the gradient of a gather, such as that of the label's log-probability, of a maximum, or of a
few largest values. A scatter needs whole rows; a choice can be made for a section of them
(loops/sections.py). It is pointwise as well, so that Inductor needs no buffer for it.

So is a scatter of one element per row into any value, such as a gradient, logits of which the
label's is masked, or a constant, as of the probabilities that a loss smooths.

``gathers_as_sums``: a gather along a loop's axis becomes sums over it, which chunks add up::

    gather(x, dim, index)  =  sum over dim of where(iota == index, x, 0)

The loss of a contrastive model's columns picks the label's logit among the tokens. A loss whose
logits mix tokens runs along the features, if at all, and picks the label's logit among these. All
other terms are zero, so both are equal. Pointwise ops with values that all tokens share are applied
after the sum (graph/one_per_row.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.one_per_row import (
    are_few,
    gather_few,
    gathered_per_row,
    scatter_few,
    scattered_per_row,
)
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.row_sums import exponents, sum_of_row
from mstpass.graph.sizes import generic, generic_shape, same_shape, symbols_of
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import argument
from mstpass.normalize.partial import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors
from mstpass.torch_internals.collectives import ALL_REDUCE
from mstpass.torch_internals.graphs import schema_of

aten = torch.ops.aten
prims = torch.ops.prims
_MEANS = (aten.mean.default, aten.mean.dim)
_VARIANCES = (aten.var.correction, aten.var_mean.correction)
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def means_as_sums(joint: JointGraph) -> Rewritten:
    """Rewrite the means of wide values over tokens, in a copy of the graph.

    Returns:
        The copy and the names of the sums in it; the graph itself if it has no such mean.
    """
    return rewritten(joint, _over_tokens(joint, _MEANS), mean_as_sum)


def mean_as_sum(rewriting: Rewriting, mean: fx.Node) -> fx.Node:
    """The sum, divided by the number of its elements."""
    (operand,) = mean.all_input_nodes
    value, shape = mean.meta["val"], operand.meta["val"].shape
    dims = reduced_dims(mean, len(shape))
    keepdim = value.dim() == len(shape)
    dtype = torch.float32 if value.dtype in _LOW_PRECISION else value.dtype
    call = rewriting.builder.call
    (count,) = rewriting.sizes.arguments([math.prod(shape[d] for d in dims)])
    total = call(aten.sum.dim_IntList, operand, dims, keepdim, dtype=dtype)
    quotient = call(aten.div.Tensor, total, count)
    if dtype == value.dtype:
        return quotient
    return call(prims.convert_element_type.default, quotient, value.dtype)


def variances_as_sums(joint: JointGraph) -> Rewritten:
    """Rewrite the variances of wide values over tokens, in a copy of the graph.

    Returns:
        The copy and the names of the sums in it; the graph itself if it has no such variance.
    """
    return rewritten(joint, _over_tokens(joint, _VARIANCES), _replace)


def _over_tokens(joint: JointGraph, targets: tuple[Any, ...]) -> Iterator[fx.Node]:
    """The reductions of wide values downstream of an anchor over all tokens, perhaps also other
    dims."""
    known = joint.cached(downstream)
    for node in joint.nodes:
        source = node.all_input_nodes[0] if node.target in targets else None
        if source in known:
            spec, anchor = known[source]
            dims = reduced_dims(node, source.meta["val"].dim())
            if set(spec) <= set(dims) and numel(source) >= int(WIDE_OF_ANCHOR * numel(anchor)):
                yield node


def _replace(rewriting: Rewriting, node: fx.Node) -> fx.Node | None:
    """The variance, by the mean, the squares and their sum; or the items of both are replaced."""
    (operand,) = node.all_input_nodes
    value, call = operand.meta["val"], rewriting.builder.call
    dims, correction = reduced_dims(node, value.dim()), argument(node, "correction")
    keepdim = bool(argument(node, "keepdim"))
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
        return results[0]
    rewriting.replace_items(node, results)
    return None


def _less(rewriting: Rewriting, count: Any, correction: float) -> Any:
    """``count - correction``; as of the variance, not below zero where the count is known."""
    if isinstance(count, fx.Node):
        return rewriting.builder.call(operator.sub, count, correction)
    return max(count - correction, 0)


def local_sums(joint: JointGraph) -> Rewritten:
    """Rewrite such sums over the results of anchors, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that changed; the graph itself if it has none.
    """
    known = joint.cached(downstream)
    found = (node for node in joint.nodes if (s := _sum_of(node)) is not None and s[0] in known)
    return rewritten(joint, found, _own_sum)


def _sum_of(total: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x, m and M, if the node is the s of the pattern."""
    if total.target is not aten.sum.dim_IntList or not any(map(is_collective, total.users)):
        return None
    values, maximum = exponents(total.args[0])
    own = None if values is None else _maximum_of_all_ranks(maximum)
    if own is None or own.target is not aten.amax.default or own.args[:1] != (values,):
        return None
    if list(own.args[1:2]) != list(total.args[1:2]) or not _keep_dims(own, total):
        return None
    return values, own, maximum


def _maximum_of_all_ranks(node: fx.Node) -> fx.Node | None:
    """What each rank gives, if the value is the maximum over the ranks."""
    if not is_wait(node) or not is_collective(node.all_input_nodes[0]):
        return None
    pending = node.all_input_nodes[0]
    name = schema_of(pending.target).name  # type: ignore[arg-type]
    if name != ALL_REDUCE or pending.args[1] != "max":
        return None
    return pending.all_input_nodes[0]


def _keep_dims(*reductions: fx.Node) -> bool:
    """Whether the results have the rank of their operand, and its dtype."""
    pairs = [(n.meta["val"], n.all_input_nodes[0].meta["val"]) for n in reductions]
    kept = all(of.dim() == by.dim() and of.dtype == by.dtype for by, of in pairs)
    return kept and len({tuple(map(generic, by.shape)) for by, _ in pairs}) == 1


def _own_sum(rewriting: Rewriting, old: fx.Node) -> fx.Node:
    """The same sum, with the rank's own maximum."""
    call, found = rewriting.builder.call, _sum_of(old)
    assert found is not None, "the copy has the sum"
    values, own, maximum = found
    with rewriting.graph.inserting_before(own.next):
        zero = rewriting.builder.filled([], 0, own.meta["val"])
        nothing = call(aten.eq.Scalar, own, float("-inf"))
        subtracted = call(aten.where.self, nothing, zero, own)
        exponentials = call(aten.exp.default, call(aten.sub.Tensor, values, subtracted))
        total = call(old.target, exponentials, *old.args[1:], **old.kwargs)
    scale = call(aten.exp.default, call(aten.sub.Tensor, own, maximum))
    empty = call(aten.eq.Scalar, own, float("-inf"))
    return call(aten.where.self, empty, zero, call(aten.mul.Tensor, total, scale))


def row_sums_of_gradients(joint: JointGraph) -> Rewritten:
    """A copy of the graph with such sums; the graph itself if it has none."""
    return rewritten(joint, (n for n in joint.nodes if _is_row_sum(joint, n)), _by_terms)


def _by_terms(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    (source,) = node.all_input_nodes
    total = sum_of_row(rewriting.builder, source, rewriting.joint.backward)
    if argument(node, "keepdim"):
        return total
    return rewriting.builder.call(aten.squeeze.dim, total, source.meta["val"].dim() - 1)


def _is_row_sum(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node sums the rows of a gradient that a product of the forward leads to."""
    if node.target is not aten.sum.dim_IntList or node not in joint.backward or node.kwargs:
        return False
    known = joint.cached(downstream)
    (source,) = node.all_input_nodes
    value, dims = value_of(source), node.args[1]
    if value is None or value.dim() < 2 or not isinstance(dims, list | tuple):
        return False
    last = value.dim() - 1
    if [d % value.dim() for d in dims] != [last] or symbols_of(value.shape[last]):  # type: ignore[operator]
        return False
    of_row = [n for user in node.users for n in user.all_input_nodes if n in known]
    shapes = [(n, other.shape) for n in of_row if (other := value_of(n)) is not None]
    return any(
        last not in known[n][0] and same_shape(shape[-1:], value.shape[-1:]) for n, shape in shapes
    )


# ---- few elements of a row -----------------------------------------------------------------------
def scattered_gradients_as_choices(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the choices; the graph itself if it has no such scatter."""
    found = (node for node in joint.nodes if _is_along_row(joint, node))
    return rewritten(joint, found, lambda copy, node: scatter_few(copy.builder, node))


def _is_along_row(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node scatters few elements along the last dim of a value."""
    count = scattered_per_row(node)
    if not are_few(count):
        return False
    base, dim = node.args[:2]
    value = value_of(node)
    assert value is not None and isinstance(dim, int), "the value is known, the dim is a number"
    last = value.dim() - 1
    if dim % value.dim() != last or symbols_of(value.shape[last]):
        return False
    return count == 1 or linearity.is_zero(base)


def gathers_as_sums(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the sums; the graph itself if it has no such gather."""
    found = (node for node in joint.nodes if _gathers_along_axis(joint, node))
    return rewritten(joint, found, lambda copy, node: gather_few(copy.builder, *node.args[:3]))  # type: ignore[arg-type]


def _gathers_along_axis(joint: JointGraph, node: fx.Node) -> bool:
    if node in joint.backward or not are_few(gathered_per_row(node)):
        return False
    source, dim = node.args[:2]
    value = value_of(source) if isinstance(source, fx.Node) else None
    if value is None or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return False
    size = value.shape[dim]
    if symbols_of(size):  # a choice along the dim needs its size
        return False
    known = joint.cached(downstream)
    if source in known:
        return known[source][0] == (dim % value.dim(),)
    return any(
        size in generic_shape(anchor.meta["val"])[-2:]
        and numel(source) >= WIDE_OF_ANCHOR * numel(anchor)
        for anchor, _ in joint.cached(anchors)
    )
