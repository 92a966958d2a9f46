"""Which ops are linear in which operands.

A fused loop computes the backward of a loss in the forward, with a tangent of 1, and scales the
gradients when the true tangent s is known. That is correct if every op on the way is linear:

    backward(s) = s * backward(1)

A *linear rule* takes a node and a set of its operands and says whether the result is linear and
homogeneous in them together, with the other operands held fixed: f(s * x) = s * f(x).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.token_rules.products import bias_and_factors
from mstpass.torch_internals.graphs import OpOverload, returns_view

aten = torch.ops.aten

LinearRule = Callable[[fx.Node, "set[fx.Node]"], bool]


def has_linear_dtype(node: fx.Node) -> bool:
    """Whether a cast to the node's dtype only rounds: to integers or to 8 bits, values saturate."""
    dtypes = (tensor.dtype for tensor in tensors_of(node.meta.get("val")))
    return all((d.is_floating_point or d.is_complex) and d.itemsize > 1 for d in dtypes)


def is_zero(node: object) -> bool:
    """Whether an argument is the number 0 or a tensor that is known to be 0 everywhere."""
    while isinstance(node, fx.Node) and _shows_elements(node.target):
        node = node.args[0]
    if isinstance(node, int | float):
        return node == 0
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target in _FILLS:
        return bool(node.args[_FILLS[node.target]] == 0)
    return node.target in (aten.zeros.default, aten.zeros_like.default)


def _shows_elements(target: Any) -> bool:
    """Whether the result of an op has no other elements than its first operand."""
    if target in (operator.getitem, aten._unsafe_view.default):
        return True
    return isinstance(target, OpOverload) and returns_view(target)


_FILLS: Mapping[Any, int] = {  # ops that fill a tensor -> position of the number
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
}


def never(node: fx.Node, operands: set[fx.Node]) -> bool:
    return False


def first_only(node: fx.Node, operands: set[fx.Node]) -> bool:
    """Linear in the first argument, if no other argument depends on the operands."""
    others: list[fx.Node] = []
    fx.map_arg(node.args[1:], others.append)
    return operands == {node.args[0]} and node.args[0] not in others


def sum_of(*terms: int) -> LinearRule:
    """Linear in a sum of arguments, if each depends on the operands or is zero.

    So are ``a + b``, and scatters of a source into a base.
    """

    def rule(node: fx.Node, operands: set[fx.Node]) -> bool:
        return all(node.args[n] in operands or is_zero(node.args[n]) for n in terms)

    return rule


def product(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``a * b``: linear if exactly one factor depends on the operands."""
    return sum(a in operands for a in node.args if isinstance(a, fx.Node)) == 1


def product_and_term(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``a * b + c``: linear if exactly one factor and the term depend on the operands."""
    a, b, c = node.args
    return (a in operands) != (b in operands) and (c in operands or is_zero(c))


def linear_cat(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``cat`` and ``stack``: linear if every part depends on the operands or is zero."""
    parts = node.args[0]
    assert isinstance(parts, tuple | list), "the parts are a list"
    return all(part in operands or is_zero(part) for part in parts)


def branches(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``where(c, a, b)``: linear if c does not depend on the operands, and a and b do or are 0."""
    return node.args[0] not in operands and sum_of(1, 2)(node, operands)


def linear_put(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``index_put``: linear if no index depends on the operands and a scatter would be linear."""
    moved = any(i in operands for i in argument(node, "indices") if isinstance(i, fx.Node))
    return not moved and sum_of(0, 2)(node, operands)


def linear_pad(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``constant_pad_nd``: linear if it pads with zeros."""
    return operands == {node.args[0]} and argument(node, "value") == 0


def linear_matmul(node: fx.Node, operands: set[fx.Node]) -> bool:
    """``a @ b + bias``: linear if exactly one matrix depends on the operands, and the bias does."""
    bias, left, right = bias_and_factors(node)
    return (left in operands) != (right in operands) and (bias is None or bias in operands)
