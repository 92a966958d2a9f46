"""Sums of exponentials relative to their maximum, ``sum(exp(x - m))`` with ``m = amax(x)``.

A softmax or ``logsumexp`` over the tokens of a loop needs both. Over chunks i they are combined in
one pass, each sum relative to the maximum m_i of its own chunk::

    m = max(m_i),   sum(exp(x - m)) = sum over i of exp(m_i - m) sum(exp(x_i - m_i))

As in the graph, no exponent is positive.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import value_of
from mstpass.graph.token_rules.along_dims import reduced_dims

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ExponentialSum:
    """The operands of such a sum.

    Attributes:
        values: x.
        maximum: m.
        dims: what both reduce over.
        bounded: the exponents are those of ``logsumexp``, x - where(|m| = inf, 0, m).
    """

    values: fx.Node
    maximum: fx.Node
    dims: tuple[int, ...]
    bounded: bool


def exponential_sum(total: fx.Node) -> ExponentialSum | None:
    """What the node sums up, if it is such a sum."""
    if total.target not in (aten.sum.dim_IntList, aten.sum.default) or total.kwargs:
        return None
    exponentials = total.args[0]
    if not isinstance(exponentials, fx.Node) or exponentials.target is not aten.exp.default:
        return None
    (shifted,) = exponentials.all_input_nodes
    if shifted.target is not aten.sub.Tensor or len(shifted.args) != 2 or shifted.kwargs:
        return None
    values, pivot = shifted.args
    if not isinstance(values, fx.Node) or not isinstance(pivot, fx.Node):
        return None
    value, shape = value_of(values), value_of(pivot)
    assert value is not None and shape is not None, "the value and shape are known"
    maximum, bounded = _maximum(pivot)
    if maximum is None or maximum.args[0] is not values:
        return None
    dims = reduced_dims(total, value.dim())
    if reduced_dims(maximum, value.dim()) != dims or shape.dim() != value.dim():
        return None
    if any(shape.shape[d] != 1 for d in dims):
        return None
    return ExponentialSum(values, maximum, tuple(dims), bounded)


def _maximum(pivot: fx.Node) -> tuple[fx.Node | None, bool]:
    """The maximum that the exponents are relative to; and whether 0 stands for an infinite one."""
    pivot = _shown(pivot)
    if pivot.target is aten.amax.default:
        return pivot, False
    if pivot.target is not aten.where.self:
        return None, False
    infinite, zero, maximum = pivot.args
    if not isinstance(infinite, fx.Node) or not isinstance(maximum, fx.Node):
        return None, False
    infinite = _shown(infinite)
    if infinite.target is not aten.eq.Scalar or infinite.args[1] != math.inf:
        return None, False
    magnitude = infinite.args[0]
    assert isinstance(magnitude, fx.Node), "the magnitude is a node"
    if magnitude.target is not aten.abs.default or not linearity.is_zero(zero):
        return None, False
    (other,) = magnitude.all_input_nodes
    maximum = _shown(maximum)
    same = _shown(other) is maximum and maximum.target is aten.amax.default
    return (maximum, True) if same else (None, False)


def _shown(node: fx.Node) -> fx.Node:
    """What reshapes of the node show."""
    while ops.is_reshape(node):
        node = node.all_input_nodes[0]
    return node


def exponentials(
    builder: Builder, values: fx.Node, maximum: fx.Node, of: ExponentialSum
) -> fx.Node:
    """The exponentials of a chunk's values, relative to the chunk's own maximum.

    Where all values are -inf, all of them are 0, as they are beside a chunk with larger ones.
    """
    value, call = maximum.meta["val"], builder.call
    infinite = (
        call(aten.eq.Scalar, call(aten.abs.default, maximum), math.inf)
        if of.bounded
        else call(aten.eq.Scalar, maximum, -math.inf)
    )
    zero = call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    pivot = call(aten.where.self, infinite, zero, maximum)
    return call(aten.exp.default, call(aten.sub.Tensor, values, pivot))
