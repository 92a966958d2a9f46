"""A scatter of few elements per row into zeros becomes choices, in the order of the rows::

    scatter_add(zeros, dim, index, gradient)  ->  sum of where(iota == index[k], gradient[k], 0)

It is the gradient of a gather, such as that of the label's log-probability, of a maximum, or of a
few largest values. A scatter needs whole rows; a choice can be made for a section of them
(loops/sections.py). It is pointwise as well, so that Inductor needs no buffer for it.

So is a scatter of one element per row into a gradient, or into what a product of the forward leads
to, such as logits of which the label's is masked.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import linearity
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.one_per_row import are_few, scatter_few, scattered_per_row
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import symbols_of
from mstpass.normalize.downstream import downstream


def scattered_gradients_as_choices(joint: JointGraph) -> Rewritten:
    """A copy of the graph with the choices; the graph itself if it has no such scatter."""
    found = [node.name for node in joint.nodes if _is_along_row(joint, node)]
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


def _is_along_row(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node scatters few elements along the last dim of a value of one row per token."""
    count = scattered_per_row(node)
    if not are_few(count):
        return False
    base, dim = node.args[:2]
    value = value_of(node)
    assert value is not None and isinstance(dim, int)
    last = value.dim() - 1
    if dim % value.dim() != last or symbols_of(value.shape[last]):
        return False
    if node not in joint.backward:
        known = joint.cached(downstream)
        return count == 1 and base in known and last not in known[base][0]
    return count == 1 or (linearity.is_zero(base) and isinstance(node.args[3], fx.Node))
