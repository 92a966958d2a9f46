"""A scatter of few elements per row into zeros becomes choices, in the order of the rows::

    scatter_add(zeros, dim, index, gradient)  ->  sum of where(iota == index[k], gradient[k], 0)

It is the gradient of a gather, such as that of the label's log-probability, of a maximum, or of a
few largest values. A scatter needs whole rows; a choice can be made for a section of them
(loops/sections.py). It is pointwise as well, so that Inductor needs no buffer for it.

So is a scatter of one element per row into a gradient, or into what a product of the forward leads
to, such as logits of which the label's is masked; and a scatter into a constant of their shape, as
of the probabilities that a loss smooths.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.one_per_row import are_few, scatter_few, scattered_per_row
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import generic_shape, symbols_of
from mstpass.normalize.downstream import downstream
from mstpass.regions.anchors import anchors


def scattered_gradients_as_choices(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the choices; the graph itself if it has no such scatter."""
    found = (node for node in joint.nodes if _is_along_row(joint, node))
    return rewritten(joint, found, _rewrite)


def _rewrite(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    with rewriting.graph.inserting_before(node):
        choice = scatter_few(rewriting.builder, node)
    rewriting.replace(node, choice)
    return choice


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
