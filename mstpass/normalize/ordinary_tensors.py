"""Replace tensors whose zeros or signs are implied by ordinary ones.

``torch.func.jvp`` has tangents of zeros without memory (``_efficientzerotensor``), and the
imaginary part of a conjugate is a view that is read with the other sign (``_neg_view``). Each kind
has a dispatch key of its own, for which higher-order ops have no kernel, so that no loop could read
it. Inductor computes both.
"""

from __future__ import annotations

from typing import Any

import torch

from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.torch_internals.fake_tensors import is_ordinary

aten = torch.ops.aten
_ZEROS = aten._efficientzerotensor.default
_ORDINARY: dict[Any, Any] = {_ZEROS: aten.full.default, aten._neg_view.default: aten.neg.default}


def ordinary_tensors(joint: JointGraph) -> Rewritten:
    """A copy of the graph with ordinary tensors, of which none counts as changed; the graph itself
    if it has no others."""
    if not any(node.target in _ORDINARY for node in joint.nodes):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    for node in rewriting.joint.nodes:
        if node.target is _ZEROS:
            node.args = (node.args[0], 0)
        node.target = _ORDINARY.get(node.target, node.target)
        values = tensors_of(node.meta.get("val"))  # assertions have none
        if node.op == "call_function" and not all(map(is_ordinary, values)):
            rewriting.builder.compute_value(node)
            rewriting.replace(node, node, [])  # it has memory of its own: views of it are renewed
    return rewriting.finished(), frozenset()
