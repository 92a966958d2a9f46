"""Sums over a row of the vocabulary that need no pass over the row of their own.

A *row* is the V elements of the last dim that belong to one token. With r and a constant along the
row and m = max(x), a sum (or mean) over the last dim is replaced if it has one of these forms:

    sum(r)                                =  V r
    sum(where(index == v, a, 0) r)        =  a r  where 0 <= index < V, else 0
    sum(x + y), sum(x - y), sum(-x)       =  the sum of the parts, if each part has such a form
    sum(log_softmax(x))                   =  sum(x - m) - V log(sum(exp(x - m)))
    sum(exp(x - where(|m| = inf, 0, m)))  =  where(|m| = inf, exp(m), sum(exp(x - m)))

A factor that is constant along the row is multiplied with the sum of the rest, whatever that is. In
the joint graph (normalize/sums_over_tokens.py), a factor of the forward becomes a weight of
the sum, ``sum(r w) = r sum(w)``, and the sum of a value of the forward is found there.

The first three give the row sum of the gradient that enters a log-softmax, under cross-entropy with
and without label smoothing, and where a few elements of a row are gathered. The fourth is the term
of label smoothing; it shares the pass that sums the exponentials, and nothing cancels, as no x - m
is positive and the logarithm is never negative. The last lets ``logsumexp`` share that pass as
well. It is exact: for m = inf both sides are inf, for m = -inf both are 0, and where m is NaN both
are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import value_of
from mstpass.graph.sizes import same_shape, symbols_of
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.tokens import CannotTake

aten = torch.ops.aten
prims = torch.ops.prims
_FULL_PRECISION = (torch.float32, torch.float64)
_MOST_TERMS = 6


def rewritten_row_sum(
    builder: Builder, target: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> fx.Node | None:
    """The result of a call, rewritten by the rules above.

    None if the call is no sum or mean over the last dim, or if no rule applies.
    """
    if target not in (aten.sum.dim_IntList, aten.mean.dim) or not isinstance(args[0], fx.Node):
        return None
    value, dims = args[0].meta["val"], args[1]
    last = value.dim() - 1
    if not isinstance(dims, list | tuple) or list(dims) not in ([last], [-1]):
        return None
    if kwargs.get("dtype") not in (None, value.dtype):
        return None
    try:
        found = sum_of_row(builder, args[0])
    except CannotTake:
        return None
    if target is aten.mean.dim:
        found = builder.call(aten.div.Scalar, found, value.shape[-1])
    keepdim = len(args) > 2 and args[2]
    return found if keepdim else builder.call(aten.squeeze.dim, found, last)


def sum_of_row(
    builder: Builder, source: fx.Node, backward: Container[fx.Node] | None = None
) -> fx.Node:
    """The sum of a value over its last dim, which stays with size 1, by the rules above.

    Args:
        backward: what the backward computes; values of the forward have sums. None: only sums by a
            rule count.

    Raises:
        CannotTake: no rule applies.
    """
    found = _RowSums(builder, source, backward).of(source)
    if not same_shape(found.meta["val"].shape, [*source.meta["val"].shape[:-1], 1]):
        raise CannotTake(source, "its rows share one sum")
    return found


class _RowSums:
    """The rules, for values of one dtype, device and row shape ``[..., 1]``."""

    def __init__(self, builder: Builder, source: fx.Node, backward: Container[fx.Node] | None):
        value = source.meta["val"]
        self.builder, self.call, self.source, self.value = builder, builder.call, source, value
        self.dtype, self.width = value.dtype, value.shape[-1]
        self.row = (*value.shape[:-1], 1)
        self.backward, self.terms = backward, 0

    def of(self, source: object, weight: fx.Node | None = None) -> fx.Node:
        """The sum over the last dim, ``[..., 1]``, of a value times a weight of the forward.

        Raises:
            CannotTake: no rule applies.
        """
        value = value_of(source) if isinstance(source, fx.Node) else None
        if not isinstance(source, fx.Node) or value is None or value.dtype != self.dtype:
            raise CannotTake(self.source, "sums a number, or values of another dtype")
        if weight is None and (closed := self._closed(source)) is not None:
            return closed
        if self.dtype not in _FULL_PRECISION and source.target is not aten.mul.Tensor:
            # The other rules multiply by V, which rounds in a narrow dtype; a sum does not.
            raise CannotTake(source, "is rounded")
        constant = _constant_along_row(source)
        if constant is None and not self._is_forward(source):
            return self._of_call(source, weight)
        self.terms += 1
        if self.terms > _MOST_TERMS:
            raise CannotTake(source, "is a sum of many terms")
        if constant is None:
            return self._sum(self._times(source, weight))
        if weight is None:
            return self.call(aten.mul.Scalar, constant, self.width)
        return self.call(aten.mul.Tensor, self._sum(weight), constant)

    def _closed(self, source: fx.Node) -> fx.Node | None:
        """The sum of a value that has a closed form of its own."""
        element = self._of_one_hot(source)
        if element is not None or self.dtype not in _FULL_PRECISION:
            return element
        return self._of_log_softmax(source) or self._of_exponentials(source)

    def _is_forward(self, node: fx.Node) -> bool:
        return self.backward is not None and node not in self.backward

    def _times(self, value: fx.Node, weight: fx.Node | None) -> fx.Node:
        return value if weight is None else self.call(aten.mul.Tensor, value, weight)

    def _of_call(self, node: fx.Node, weight: fx.Node | None) -> fx.Node:
        """The sum of what an op computes, from the sums of its operands."""
        target: Any = node.target
        if node.kwargs:
            raise CannotTake(node, "has no rule")
        if target is aten.expand.default:
            return self.of(node.args[0], weight)
        if target in (aten.add.Tensor, aten.sub.Tensor, aten.neg.default):
            return self.call(target, *(self.of(part, weight) for part in node.args))
        if target is aten.where.self:
            return self._of_choice(node, weight)
        if target in (aten.mul.Tensor, aten.div.Tensor):
            return self._of_product(node, weight)
        if self.backward is not None and ops.is_view_by_shape(node):
            return self._of_view(node, weight)
        raise CannotTake(node, "has no rule")

    def _of_product(self, node: fx.Node, weight: fx.Node | None) -> fx.Node:
        """With a factor of each row behind the sum, and one of the forward in the weight.

        Where one of 0 and a factor that is not finite are multiplied, the sum is NaN.
        """
        target: Any = node.target
        left, right = node.args
        is_product = target is aten.mul.Tensor
        pairs = ((left, right), (right, left)) if is_product else ((left, right),)
        for value, factor in pairs:
            if not isinstance(factor, fx.Node):
                return self.call(target, self.of(value, weight), factor)
            if (constant := _constant_along_row(factor)) is not None:
                total = self.call(target, self.of(value, weight), constant)
                if not is_product:
                    return total
                zero = self.call(aten.mul.Tensor, constant, self.builder.filled([], 0, self.value))
                return self.call(aten.add.Tensor, total, zero)
        for value, factor in pairs:
            if isinstance(factor, fx.Node) and self._is_forward(factor):
                inverse = factor if is_product else self.call(aten.reciprocal.default, factor)
                return self.of(value, self._times(inverse, weight))
        raise CannotTake(node, "is no product of a row and a number")

    def _of_choice(self, node: fx.Node, weight: fx.Node | None) -> fx.Node:
        """``where(condition, x, 0)``, or with 0 and x changed, for a condition of the forward."""
        condition, hit, miss = node.args
        hits = linearity.is_zero(miss)
        if not isinstance(condition, fx.Node) or not (hits or linearity.is_zero(hit)):
            raise CannotTake(node, "chooses between two values")
        zero, one = (self.builder.filled([], n, self.value) for n in (0, 1))

        def chosen(value: fx.Node) -> fx.Node:
            return self.call(
                aten.where.self, condition, *((value, zero) if hits else (zero, value))
            )

        value = hit if hits else miss
        if condition.meta["val"].shape[-1] == 1:
            return chosen(self.of(value, weight))
        if not self._is_forward(condition):
            raise CannotTake(node, "chooses within the row")
        return self.of(value, chosen(one if weight is None else weight))

    def _of_view(self, node: fx.Node, weight: fx.Node | None) -> fx.Node:
        """The sums of a view that keeps the rows."""
        source: Any = node.args[0]
        before, shape = list(source.meta["val"].shape), list(node.meta["val"].shape)
        if before[-1:] != shape[-1:] or any(map(symbols_of, (*before, *shape))):
            raise CannotTake(node, "does not keep the rows")
        if weight is not None:
            weight = self.call(aten.expand.default, weight, shape)
            weight = self.call(aten.reshape.default, weight, before)
        total = self.call(aten.expand.default, self.of(source, weight), [*before[:-1], 1])
        return self.call(aten.reshape.default, total, [*shape[:-1], 1])

    # ---- one-hot values -----------------------------------------------------------------------
    def _of_one_hot(self, node: fx.Node) -> fx.Node | None:
        """``a``, if the node is ``where(index == iota(V), a, 0)`` with one index per row."""
        equal, hit, miss = _operands(node, aten.where.self) or (None,) * 3
        if not _is_call(equal, aten.eq.Tensor) or not linearity.is_zero(miss):
            return None
        if not isinstance(hit, fx.Node) or (hit := _constant_along_row(hit)) is None:
            return None
        for index, places in (equal.args, reversed(equal.args)):
            index, places = _without_expand(index), _without_expand(places)
            if index is None or places is None or places.target is not prims.iota.default:
                continue
            counts = places.args == (self.width,) and places.kwargs["start"] == 0
            if counts and places.kwargs["step"] == 1 and tuple(index.meta["val"].shape) == self.row:
                from_start = self.call(aten.ge.Scalar, index, 0)
                below = self.call(aten.lt.Scalar, index, self.width)
                in_bounds = self.call(aten.bitwise_and.Tensor, from_start, below)
                zero = self.builder.filled([], 0, self.value)
                return self.call(aten.where.self, in_bounds, hit, zero)
        return None

    # ---- softmax ------------------------------------------------------------------------------
    def _of_log_softmax(self, source: fx.Node) -> fx.Node | None:
        """``sum(x - m) - V log(sum(exp(x - m)))``, for ``(x - m) - log(sum(exp(x - m)))``."""
        shifted, log = _operands(source, aten.sub.Tensor) or (None, None)
        x, m = _operands(shifted, aten.sub.Tensor) or (None, None)
        (total,) = _operands(log, aten.log.default) or (None,)
        exponentials, *_ = _operands(total, aten.sum.dim_IntList) or (None,)
        if _operands(exponentials, aten.exp.default) != (shifted,):
            return None
        if not self._is_maximum(m, x) or not self._is_row_reduction(total):
            return None
        constant = self.call(aten.mul.Scalar, log, self.width)
        return self.call(aten.sub.Tensor, self._sum(shifted), constant)

    def _of_exponentials(self, source: fx.Node) -> fx.Node | None:
        """``where(|m| = inf, exp(m), sum(exp(x - m)))``, for the exponentials of ``logsumexp``."""
        x, pivot = exponents(source)
        m, infinite = _maximum(pivot)
        if infinite is None or not self._is_maximum(m, x):
            return None
        if _operands(pivot, aten.where.self)[2:] != (m,):
            return None
        shifted = self.call(aten.sub.Tensor, x, m)
        total = self._sum(self.call(aten.exp.default, shifted))
        return self.call(aten.where.self, infinite, self.call(aten.exp.default, m), total)

    def _sum(self, values: fx.Node) -> fx.Node:
        return self.call(aten.sum.dim_IntList, values, [values.meta["val"].dim() - 1], True)

    def _is_maximum(self, m: object, x: object) -> bool:
        return _is_call(m, aten.amax.default) and m.args[0] is x and self._is_row_reduction(m)

    def _is_row_reduction(self, reduction: fx.Node) -> bool:
        """Whether it reduces the last dim alone, with ``keepdim``."""
        last = len(self.row) - 1
        keeps = tuple(reduction.meta["val"].shape) == self.row
        return keeps and reduced_dims(reduction, last + 1) == [last]


def _is_call(node: object, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is target


def _constant_along_row(node: fx.Node) -> fx.Node | None:
    """What a value is without expands, if that has one element per row, or one in all."""
    constant = _without_expand(node)
    shape = None if constant is None else constant.meta["val"].shape
    return constant if shape is not None and list(shape[-1:]) in ([], [1]) else None


def _without_expand(node: object) -> fx.Node | None:
    """The operand of expands, or of the reshape that makes an iota a row; otherwise the node."""
    while isinstance(node, fx.Node):
        source = node.args[0] if node.args else None
        is_row = node.target in (aten.reshape.default, aten.view.default)
        is_iota_row = is_row and _is_call(source, prims.iota.default)
        if node.target is not aten.expand.default and not is_iota_row:
            return node
        node = source
    return None


def _operands(node: object, *targets: object) -> tuple[Any, ...]:
    """The arguments of a call of one of these ops without keyword arguments; else none."""
    if not isinstance(node, fx.Node) or node.target not in targets or node.kwargs:
        return ()
    return node.args


# ---- sums of exponentials, over any dims ---------------------------------------------------------
# A softmax or ``logsumexp`` over the tokens of a loop needs the maximum m and the sum of all
# exponentials. Over chunks i they are combined in one pass, each sum relative to the maximum m_i of
# its own chunk::
#
#     m = max(m_i),   sum(exp(x - m)) = sum over i of exp(m_i - m) sum(exp(x_i - m_i))
#
# As in the graph, no exponent is positive.
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
    summed, *_ = _operands(total, aten.sum.dim_IntList, aten.sum.default) or (None,)
    values, pivot = exponents(summed)
    maximum, infinite = _maximum(pivot)
    if maximum is None or maximum.args[:1] != (values,):
        return None
    value, shape = values.meta["val"], pivot.meta["val"].shape
    dims = reduced_dims(total, value.dim())
    if reduced_dims(maximum, value.dim()) != dims or len(shape) != value.dim():
        return None
    if any(shape[d] != 1 for d in dims):
        return None
    return ExponentialSum(values, maximum, tuple(dims), infinite is not None)


def exponents(exponentials: object) -> tuple[Any, Any]:
    """x and m, if the node is ``exp(x - m)``; None and None if it is not."""
    (shifted,) = _operands(exponentials, aten.exp.default) or (None,)
    values, pivot = _operands(shifted, aten.sub.Tensor) or (None, None)
    both = isinstance(values, fx.Node) and isinstance(pivot, fx.Node)
    return (values, pivot) if both else (None, None)


def _maximum(pivot: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """The maximum that exponents are relative to; and, if 0 stands for an infinite one, whether it
    is infinite."""
    pivot = _shown(pivot)
    if _is_call(pivot, aten.amax.default):
        return pivot, None
    infinite, zero, maximum = _operands(pivot, aten.where.self) or (None,) * 3
    magnitude, bound = _operands(_shown(infinite), aten.eq.Scalar) or (None, None)
    (other,) = _operands(magnitude, aten.abs.default) or (None,)
    maximum = _shown(maximum)
    if bound != math.inf or not linearity.is_zero(zero) or _shown(other) is not maximum:
        return None, None
    return (maximum, infinite) if _is_call(maximum, aten.amax.default) else (None, None)


def _shown(node: Any) -> Any:
    """What reshapes of the node show."""
    return ops.behind(node, ops.is_reshape) if isinstance(node, fx.Node) else node


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
    pivot = call(aten.where.self, infinite, builder.filled([], 0, value), maximum)
    return call(aten.exp.default, call(aten.sub.Tensor, values, pivot))
