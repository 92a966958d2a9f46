"""Inverses of functions of one value, where the graph proves that the argument is in a range.

Outside that range the result no longer determines the argument: exp underflows, tanh and sigmoid
are flat. value_ranges.py proves ranges. (aten's own backward of exp, sigmoid, tanh and relu reads
their results, not their arguments, so nothing needs to be reconstructed for them.)

GELU and SiLU have no inverse: both fall and then rise. A mask of the branch (one bit per element;
Tempo, arXiv 2210.10246) would give them one. But that saves the result and the mask in place of the
argument alone, and so saves nothing: the result can be recomputed from the argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import fx

from mstpass.partition.reconstruct.rule import (
    EXACT,
    TOLERANT,
    Found,
    Inverse,
    Read,
    Refused,
    Writer,
    aten,
    dtype_of,
    names,
)
from mstpass.partition.reconstruct.rules.value_ranges import value_range


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that has an inverse on arguments in [low, high], in float32.

    ``inverse(writer, y)`` writes the argument of the result ``y``, within the error ``bound``.
    """

    low: float
    high: float
    inverse: Callable[[Writer, fx.Node], fx.Node]
    bound: str


def _logit(writer: Writer, y: fx.Node) -> fx.Node:
    one_minus = writer.call(aten.sub.Tensor, writer.call(aten.neg.default, y), -1.0)
    return writer.call(aten.log.default, writer.call(aten.div.Tensor, y, one_minus))


def _atanh(writer: Writer, y: fx.Node) -> fx.Node:
    return writer.call(aten.atanh.default, y)


def _log(writer: Writer, y: fx.Node) -> fx.Node:
    return writer.call(aten.log.default, y)


def _exp(writer: Writer, y: fx.Node) -> fx.Node:
    return writer.call(aten.exp.default, y)


def _softplus_inverse(writer: Writer, y: fx.Node) -> fx.Node:
    """``y + log(1 - exp(-y))``."""
    fall = writer.call(aten.expm1.default, writer.call(aten.neg.default, y))
    logarithm = writer.call(aten.log.default, writer.call(aten.neg.default, fall))
    return writer.call(aten.add.Tensor, y, logarithm)


INF = float("inf")
FUNCTIONS: dict[object, Function] = {
    aten.exp.default: Function(-80.0, 80.0, _log, "2^-22 (1 + |x|), absolute"),
    aten.log.default: Function(0.0, INF, _exp, "2^-22 (1 + |log x|), relative"),
    aten.sigmoid.default: Function(-8.0, 8.0, _logit, "2^-22 exp |x|, absolute"),
    aten.tanh.default: Function(-4.0, 4.0, _atanh, "2^-22 cosh(x)^2, absolute"),
    aten.softplus.default: Function(-8.0, INF, _softplus_inverse, "2^-22 (1 + |x|), absolute"),
}


def find_function(node: fx.Node) -> Found:
    function = FUNCTIONS[node.target]
    (operand,) = node.all_input_nodes
    low, high = value_range(operand)
    if dtype_of(node) != torch.float32 or dtype_of(operand) != torch.float32:
        yield Refused(operand.name, node.name, "function", "it is not in float32")
    elif len(node.args) > 1 or node.kwargs:
        yield Refused(operand.name, node.name, "function", "its parameters are not the default")
    elif low < function.low or high > function.high:
        reason = f"its argument may leave [{function.low:g}, {function.high:g}]"
        yield Refused(operand.name, node.name, "function", reason)
    else:
        yield Inverse(
            operand.name,
            names(node),
            node.name,
            "function",
            TOLERANT,
            function.bound,
            magnifies=True,
        )


def write_function(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return FUNCTIONS[op.target].inverse(writer, read(op))


# ---- relu -------------------------------------------------------------------------------------
_SIGNS = (aten.gt.Scalar, aten.le.Scalar)


def find_relu(node: fx.Node) -> Found:
    """The masks ``x > 0`` and ``x <= 0`` follow from ``relu(x)``, for zeros and NaN too."""
    (operand,) = node.all_input_nodes
    for mask in operand.users:
        if mask.target in _SIGNS and mask.args[1] == 0:
            yield Inverse(mask.name, names(node), node.name, "relu mask", EXACT)
    yield Refused(operand.name, node.name, "relu mask", "relu loses numbers below zero")


def write_relu(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return writer.call(target.target, read(op), 0)
