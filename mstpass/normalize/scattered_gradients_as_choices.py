"""A scatter of few elements per row into zeros becomes choices, in the order of the rows::

    scatter_add(zeros, dim, index, gradient)  ->  sum of where(iota == index[k], gradient[k], 0)

It is the gradient of a gather, such as that of the label's log-probability, of a maximum, or of a
few largest values. A scatter needs whole rows; a choice can be made for a section of them
(loops/sections.py). It is pointwise as well, so that Inductor needs no buffer for it.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import linearity
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.one_per_row import are_few, scatter_few, scattered_per_row
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import symbols_of

aten = torch.ops.aten
_SCATTERS = (aten.scatter_add.default, aten.scatter.src)


def scattered_gradients_as_choices(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the choices; the graph itself if it has no such scatter."""
    found = [node.name for node in joint.nodes if _is_scattered_gradient(node, joint)]
    if not found:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    changed = set[str]()
    for name in found:
        node = rewriting.joint.by_name[name]
        with rewriting.graph.inserting_before(node):
            choice = scatter_few(rewriting.builder, node)
        rewriting.replace(node, choice)
        changed.add(choice.name)
    return rewriting.finished(), frozenset(changed)


def _is_scattered_gradient(node: fx.Node, joint: JointGraph) -> bool:
    if node.target not in _SCATTERS or node not in joint.backward:
        return False
    if not are_few(scattered_per_row(node)):
        return False
    value, dim = value_of(node), node.args[1]
    assert value is not None and isinstance(dim, int)
    is_last = dim % value.dim() == value.dim() - 1
    return is_last and linearity.is_zero(node.args[0]) and not symbols_of(value.shape[dim])
