"""Replace tensors whose zeros or signs are implied by ordinary ones.

``torch.func.jvp`` has tangents of zeros without memory (``_efficientzerotensor``), and the
imaginary part of a conjugate is a view that is read with the other sign (``_neg_view``). Each kind
has a dispatch key of its own, for which higher-order ops have no kernel, so that no loop could read
it. Inductor computes both.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph, tensors_of, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.torch_internals.fake_tensors import is_ordinary

aten = torch.ops.aten
_ZEROS, _NEGATED = aten._efficientzerotensor.default, aten._neg_view.default


def ordinary_tensors(joint: JointGraph) -> Rewritten:
    """A copy of the graph with ordinary tensors, of which none counts as changed; the graph itself
    if it has no others."""
    if not any(node.target in (_ZEROS, _NEGATED) for node in joint.nodes):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    for node in rewriting.joint.nodes:
        if node.target in (_ZEROS, _NEGATED):
            with rewriting.graph.inserting_before(node):
                rewriting.replace(node, _ordinary(rewriting.builder, node))
        elif node.op == "call_function" and not all(map(is_ordinary, tensors_of(node.meta["val"]))):
            rewriting.builder.compute_value(node)
    return rewriting.finished(), frozenset()


def _ordinary(builder: Builder, node: fx.Node) -> fx.Node:
    value = value_of(node)
    assert value is not None
    if node.target is _NEGATED:
        return builder.call(aten.neg.default, node.args[0])
    kind = {"dtype": value.dtype, "device": value.device}
    return builder.call(aten.full.default, node.args[0], 0, **kind)
