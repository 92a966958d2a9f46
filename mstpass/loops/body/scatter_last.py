"""Add elements to a gradient once it is computed, not to zeros beforehand.

The gradient of logits of which the loss gathers several log-probabilities is the sum of a scatter
and of a pointwise value. A scatter writes into a buffer of its own; here it is that of the sum::

    zeros.scatter_add(dim, index, a) + b   =   b.scatter_add(dim, index, a)

The result differs by rounding where an index comes twice.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import linearity
from mstpass.graph.builder import Builder
from mstpass.graph.joint import value_of
from mstpass.graph.sizes import same_shape

aten = torch.ops.aten


def scatter_last(builder: Builder) -> None:
    """Rewrite all such sums and differences of the graph, in place."""
    for node in list(builder.graph.nodes):
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
            continue
        found = _scatter_and_rest(node)
        if found is None:
            continue
        scatter, rest = found
        dim, index, source = scatter.args[1:4]
        with builder.graph.inserting_before(node):
            if node.target is aten.sub.Tensor:
                negated = rest if scatter is node.args[0] else source
                opposite = builder.call(aten.neg.default, negated)
                rest, source = (opposite, source) if negated is rest else (rest, opposite)
            total = builder.call(aten.scatter_add.default, rest, dim, index, source)
        node.replace_all_uses_with(total)
        builder.graph.erase_node(node)
        builder.graph.erase_node(scatter)


def _scatter_and_rest(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operand that is a scatter into zeros, which nothing else reads, and the other one."""
    first, second = node.args
    for scatter, rest in ((first, second), (second, first)):
        if not isinstance(scatter, fx.Node) or not isinstance(rest, fx.Node):
            continue
        if scatter.target is not aten.scatter_add.default or len(scatter.users) != 1:
            continue
        values = [value_of(n) for n in (node, scatter, rest)]
        like = values[0]
        if linearity.is_zero(scatter.args[0]) and all(
            v is not None and v.dtype == like.dtype and same_shape(v.shape, like.shape)  # type: ignore[union-attr]
            for v in values
        ):
            return scatter, rest
    return None
