"""Inverses of functions of one value, where the graph proves that the argument is in a range.

Outside that range the result no longer determines the argument: exp underflows, tanh and sigmoid
are flat. (aten's own backward of exp, sigmoid, tanh and relu reads
their results, not their arguments, so nothing needs to be reconstructed for them.)

GELU and SiLU have no inverse: both fall and then rise. A mask of the branch (one bit per element;
Tempo, arXiv 2210.10246) would give them one. But that saves the result and the mask in place of the
argument alone, and so saves nothing: the result can be recomputed from the argument.

``value_range`` is the range in which a value must lie whatever the inputs are: it proves a rule's
condition. Ranges are known for constants, for functions of a bounded range, and for arithmetic on
such values. ``rsqrt`` of a finite float32 number is at least 5e-20; infinite operands are not
considered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.partition.reconstruct.rule import (
    CAST,
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

Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)
_DEPTH = 8  # ops that are followed from a value towards the inputs
_KEEP_ELEMENTS = frozenset(
    {
        CAST,
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.permute.default,
        aten.clone.default,
    }
)


def value_range(node: object, depth: int = _DEPTH) -> Interval:
    """The least and the greatest number that an element of the node can be.

    The node may also be a number.
    """
    if isinstance(node, bool | int | float):
        return float(node), float(node)
    if not isinstance(node, fx.Node) or node.op != "call_function" or depth == 0:
        return ANY
    if node.target in _KEEP_ELEMENTS:
        return value_range(node.args[0], depth - 1)
    if node.target is aten.full.default:
        return value_range(node.args[1])
    known = ops.row(node).range or ANY
    derive = _ARITHMETIC.get(node.target)
    if derive is None or node.kwargs.get("alpha", 1) != 1:
        return known
    low, high = derive(*(value_range(a, depth - 1) for a in node.args))
    return max(low, known[0]), min(high, known[1])


def excludes_zero(interval: Interval) -> bool:
    low, high = interval
    return low > 0.0 or high < 0.0


def _add(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _mul(a: Interval, b: Interval) -> Interval:
    if ANY in (a, b):
        return ANY
    products = [x * y for x in a for y in b]
    return ANY if any(map(math.isnan, products)) else (min(products), max(products))


def _exp_of_range(a: Interval) -> Interval:
    return tuple(math.inf if x > 700.0 else math.exp(x) for x in a)  # type: ignore[return-value]


def _clamp(a: Interval, low: Interval = ANY, high: Interval = ANY) -> Interval:
    return max(a[0], low[0]), min(a[1], high[1])


_ARITHMETIC: dict[object, Callable[..., Interval]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: lambda a, b: _add(a, (-b[1], -b[0])),
    aten.mul.Tensor: _mul,
    aten.neg.default: lambda a: (-a[1], -a[0]),
    aten.exp.default: _exp_of_range,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda a, high: _clamp(a, ANY, high),
}


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
