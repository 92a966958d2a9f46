"""A gather of one token for each feature becomes a sum over tokens, which chunks can add up::

    gather(x, token dim, index)  =  sum over tokens of where(iota == index, x, 0)

The loss of a contrastive model's columns picks the label's logit of each column in this way. All
other terms are zero, so both are equal. Pointwise ops with values that all tokens share are applied
after the sum (graph/one_per_row.py).
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.one_per_row import gather_one, is_gather_of_one
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import symbols_of
from mstpass.normalize.downstream import downstream

aten = torch.ops.aten


def gathers_as_sums(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the sums; the graph itself if it has no such gather."""
    found = [node.name for node in joint.nodes if _gathers_tokens(joint, node)]
    if not found:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    made = set[str]()
    for name in found:
        node = rewriting.joint.by_name[name]
        source, dim, index = node.args[:3]
        assert isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node)
        with rewriting.graph.inserting_before(node):
            gathered = gather_one(rewriting.builder, source, dim, index)
        rewriting.replace(node, gathered)
        made.add(gathered.name)
    _decompose_all(rewriting)
    return rewriting.finished(), frozenset(made)


def _decompose_all(rewriting: Rewriting) -> None:
    """Write ``all``, by which indices are checked, as AOTAutograd does: Inductor has no other."""
    for node in rewriting.graph.find_nodes(op="call_function", target=aten.all.default):
        with rewriting.graph.inserting_before(node):
            call = rewriting.builder.call
            others = call(aten.logical_not.default, node.args[0])
            none = call(aten.logical_not.default, call(aten.any.default, others))
        rewriting.replace(node, none)


def _gathers_tokens(joint: JointGraph, node: fx.Node) -> bool:
    if node in joint.backward or not is_gather_of_one(node):
        return False
    source, dim = node.args[:2]
    known = joint.cached(downstream)
    if source not in known or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return False
    value = value_of(source)
    assert value is not None
    rank, (spec, _) = value.dim(), known[source]
    # a choice along the dim needs its size
    return spec == (dim % rank,) and not symbols_of(value.shape[dim])
