"""The range in which a value must lie whatever the inputs are: it proves a rule's condition.

Ranges are known for constants, for functions of a bounded range, and for arithmetic on such values.
``rsqrt`` of a finite float32 number is at least 5e-20; infinite operands are not considered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import fx

from mstpass.graph import ops
from mstpass.partition.reconstruct.rule import CAST, aten

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


def _exp(a: Interval) -> Interval:
    return tuple(math.inf if x > 700.0 else math.exp(x) for x in a)  # type: ignore[return-value]


def _clamp(a: Interval, low: Interval = ANY, high: Interval = ANY) -> Interval:
    return max(a[0], low[0]), min(a[1], high[1])


_ARITHMETIC: dict[object, Callable[..., Interval]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: lambda a, b: _add(a, (-b[1], -b[0])),
    aten.mul.Tensor: _mul,
    aten.neg.default: lambda a: (-a[1], -a[0]),
    aten.exp.default: _exp,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda a, high: _clamp(a, ANY, high),
}
