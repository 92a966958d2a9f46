"""Which ops are linear, and in which operands: what lets a fused loop run with a tangent of 1.

A rule answers: is the result linear (and homogeneous) in these operands, the others held fixed?
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph.token_rules.basic import argument, factors
from mstpass.torch_internals.op_types import OpOverload, schema_of

aten = torch.ops.aten
prims = torch.ops.prims

Linear = Callable[[fx.Node, "set[fx.Node]"], bool]

# Ops whose elements are their operand's, in other places.
VIEWS = frozenset(
    {
        operator.getitem,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.expand.default,
        aten.select.int,
        aten.unbind.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)


def is_zero(node: object) -> bool:
    """A constant that is 0 everywhere."""
    if isinstance(node, int | float):
        return node == 0
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target in _FILLS:
        return bool(node.args[_FILLS[node.target]] == 0)
    if node.target in (aten.zeros.default, aten.zeros_like.default):
        return True
    return node.target in VIEWS and is_zero(node.args[0])


_FILLS: Mapping[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
}


def linear_in(target: OpOverload) -> Linear:
    if schema_of(target).name == "prims::fma":  # Inductor's own; 2.11 has none
        return _product_and_term
    return _LINEAR_POINTWISE.get(target, never)


def never(node: fx.Node, operands: set[fx.Node]) -> bool:
    return False


def first_only(node: fx.Node, operands: set[fx.Node]) -> bool:
    return operands == {node.args[0]} and not any(a in operands for a in _flat(node)[1:])


def _product(node: fx.Node, operands: set[fx.Node]) -> bool:
    """Linear when exactly one factor depends on the operands."""
    return sum(a in operands for a in node.args if isinstance(a, fx.Node)) == 1


def _product_and_term(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``a * b + c``: linear when one factor depends on the operands, and so does the term."""
    a, b, c = node.args
    return (a in operands) != (b in operands) and (c in operands or is_zero(c))


def linear_cat(node: fx.Node, operands: set[fx.Node]) -> bool:
    """cat, stack: every part depends on the operands or is zero."""
    parts = node.args[0]
    assert isinstance(parts, tuple | list)
    return all(part in operands or is_zero(part) for part in parts)


def _sum_of_two(node: fx.Node, operands: set[fx.Node]) -> bool:
    return all(a in operands or is_zero(a) for a in node.args[:2])


def _branches(node: fx.Node, operands: set[fx.Node]) -> bool:
    return node.args[0] not in operands and all(a in operands or is_zero(a) for a in node.args[1:3])


def _flat(node: fx.Node) -> list[Any]:
    first = node.args[0]
    return [*(first if isinstance(first, tuple | list) else [first]), *node.args[1:]]


_LINEAR_POINTWISE: Mapping[Any, Linear] = {
    aten.mul.Tensor: _product,
    aten.mul.Scalar: first_only,
    aten.div.Tensor: first_only,
    aten.div.Scalar: first_only,
    aten.neg.default: first_only,
    aten.add.Tensor: _sum_of_two,
    aten.sub.Tensor: _sum_of_two,
    aten.where.self: _branches,
    **dict.fromkeys(
        (
            aten.threshold_backward.default,
            aten.gelu_backward.default,
            aten.silu_backward.default,
            aten.sigmoid_backward.default,
            aten.tanh_backward.default,
            aten.native_dropout_backward.default,
        ),
        first_only,
    ),
    aten.clone.default: first_only,
    prims.convert_element_type.default: first_only,
}


def linear_view(node: fx.Node, operands: set[fx.Node]) -> bool:
    return operands == {node.args[0]}


def linear_scatter(node: fx.Node, operands: set[fx.Node]) -> bool:
    """scatter and its like, of a linear source into zeros or of zeros into a linear base."""
    base, *rest = node.args
    source = rest[0] if node.target in _SOURCE_SECOND else rest[-1]
    return all(a in operands or is_zero(a) for a in (base, source))


_SOURCE_SECOND = frozenset({aten.slice_scatter.default, aten.select_scatter.default})


def linear_put(node: fx.Node, operands: set[fx.Node]) -> bool:
    """index_put of a linear source into zeros, or of zeros into a linear base."""
    indices = argument(node, "indices")
    if any(i in operands for i in indices if isinstance(i, fx.Node)):
        return False
    return all(a in operands or is_zero(a) for a in (node.args[0], node.args[2]))


def linear_pad(node: fx.Node, operands: set[fx.Node]) -> bool:
    return operands == {node.args[0]} and argument(node, "value") == 0


def linear_matmul(node: fx.Node, operands: set[fx.Node]) -> bool:
    bias, a, b = factors(node)
    return (a in operands) != (b in operands) and (bias is None or bias in operands)
