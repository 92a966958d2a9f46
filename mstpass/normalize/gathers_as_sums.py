"""A gather of few elements along a loop's axis becomes sums over it, which chunks can add up::

    gather(x, dim, index)  =  sum over dim of where(iota == index, x, 0)

The loss of a contrastive model's columns picks the label's logit among the tokens. A loss whose
logits mix tokens runs along the features, if at all, and picks the label's logit among these. All
other terms are zero, so both are equal. Pointwise ops with values that all tokens share are applied
after the sum (graph/one_per_row.py).
"""

from __future__ import annotations

from torch import fx

from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.one_per_row import are_few, gather_few, gathered_per_row
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import generic_shape, symbols_of
from mstpass.normalize.downstream import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors


def gathers_as_sums(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the sums; the graph itself if it has no such gather."""
    found = [node.name for node in joint.nodes if _gathers_along_axis(joint, node)]
    if not found:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    before = set(rewriting.graph.nodes)
    for name in found:
        node = rewriting.joint.by_name[name]
        source, dim, index = node.args[:3]
        assert isinstance(source, fx.Node) and isinstance(index, fx.Node), "both are nodes"
        assert isinstance(dim, int), "the dim is a number"
        with rewriting.graph.inserting_before(node):
            gathered = gather_few(rewriting.builder, source, dim, index)
        rewriting.replace(node, gathered)
    made = [node.name for node in rewriting.graph.nodes if node not in before]
    return rewriting.finished(), frozenset(made)


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
