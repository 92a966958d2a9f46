"""Gathers and scatters of few elements per row, as choices and sums in the order of the rows.

``scattered_gradients_as_choices``: a scatter into zeros becomes choices, in the rows' order::

    scatter_add(zeros, dim, index, gradient)  ->  sum of where(iota == index[k], gradient[k], 0)

It is the gradient of a gather, such as that of the label's log-probability, of a maximum, or of a
few largest values. A scatter needs whole rows; a choice can be made for a section of them
(loops/sections.py). It is pointwise as well, so that Inductor needs no buffer for it.

So is a scatter of one element per row into a gradient, or into what a product of the forward leads
to, such as logits of which the label's is masked; and a scatter into a constant of their shape, as
of the probabilities that a loss smooths.

``gathers_as_sums``: a gather along a loop's axis becomes sums over it, which chunks add up::

    gather(x, dim, index)  =  sum over dim of where(iota == index, x, 0)

The loss of a contrastive model's columns picks the label's logit among the tokens. A loss whose
logits mix tokens runs along the features, if at all, and picks the label's logit among these. All
other terms are zero, so both are equal. Pointwise ops with values that all tokens share are applied
after the sum (graph/one_per_row.py).
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.one_per_row import (
    are_few,
    gather_few,
    gathered_per_row,
    scatter_few,
    scattered_per_row,
)
from mstpass.graph.rewriting import Rewritten, rewritten
from mstpass.graph.sizes import generic_shape, symbols_of
from mstpass.normalize.token_window import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors


def scattered_gradients_as_choices(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the choices; the graph itself if it has no such scatter."""
    found = (node for node in joint.nodes if _is_along_row(joint, node))
    return rewritten(joint, found, lambda copy, node: scatter_few(copy.builder, node))


def _is_along_row(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node scatters few elements along the last dim of a value of one row per token."""
    count = scattered_per_row(node)
    if not are_few(count):
        return False
    base, dim = node.args[:2]
    value = value_of(node)
    assert value is not None and isinstance(dim, int), "the value is known, the dim is a number"
    last = value.dim() - 1
    if dim % value.dim() != last or symbols_of(value.shape[last]):
        return False
    if count > 1 and not linearity.is_zero(base):
        return False
    return node in joint.backward or _is_of_logits(joint, node, last)


def _is_of_logits(joint: JointGraph, node: fx.Node, last: int) -> bool:
    """Whether a scatter of the forward works on logits, or makes a value of their shape."""
    base, known = node.args[0], joint.cached(downstream)
    if not isinstance(base, fx.Node):
        return False
    if base in known:
        return last not in known[base][0]
    if not ops.is_constant(base):
        return False
    shape = generic_shape(node.meta["val"])
    return any(
        shape[-1] == generic_shape(anchor.meta["val"])[-1] and numel(node) == numel(anchor)
        for anchor, _ in joint.cached(anchors)
    )


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
