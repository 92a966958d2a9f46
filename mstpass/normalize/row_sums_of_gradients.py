"""The sum of a gradient over a row of the vocabulary is made of sums that the forward knows.

The gradient of a log-softmax reads the sum of each row of the gradient that enters it. Let that
gradient be a sum of products, each of a factor r with one element per row, which the backward
brings, and a value w that only depends on the forward::

    sum over v of (r1 w1[v] + r2 w2[v] + ...)  =  r1 sum(w1) + r2 sum(w2) + ...

The sums of w are found where the forward has the row at hand. What is left reads one number per
row, so that a loop over sections of the vocabulary needs no other section (loops/sections.py). Some
sums have a closed form (graph/row_sums.py): that of a label's gradient is its one element.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.row_sums import sum_of_row
from mstpass.graph.sizes import same_shape, symbols_of
from mstpass.graph.token_rules.arguments import argument
from mstpass.normalize.token_window import downstream

aten = torch.ops.aten
_FULL_PRECISION = (torch.float32, torch.float64)
_MOST_TERMS = 6


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
