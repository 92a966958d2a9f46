"""Sums over a row of the vocabulary that need no pass over the row of their own.

A *row* is the V elements of the last dim that belong to one token. With r and a constant along the
row and m = max(x), a sum (or mean) over the last dim is replaced if it has one of these forms:

    sum(r)                                =  V r
    sum(where(index == v, a, 0) r)        =  a r  where 0 <= index < V, else 0
    sum(zeros.scatter_add(index, a))      =  sum(a)
    sum(x + y), sum(x - y), sum(-x)       =  the sum of the parts, if each part has such a form
    sum(log_softmax(x))                   =  sum(x - m) - V log(sum(exp(x - m)))
    sum(exp(x - where(|m| = inf, 0, m)))  =  where(|m| = inf, exp(m), sum(exp(x - m)))

The first four give the row sum of the gradient that enters a log-softmax, under cross-entropy with
and without label smoothing, and where several elements of a row are gathered. The fifth is the term
of label smoothing; it shares the pass that sums the exponentials, and nothing cancels, as no x - m
is positive and the logarithm is never negative. The last lets ``logsumexp`` share that pass as
well. It is exact: for m = inf both sides are inf, for m = -inf both are 0, and where m is NaN both
are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.token_rules.along_dims import reduced_dims

aten = torch.ops.aten
prims = torch.ops.prims
_FULL_PRECISION = (torch.float32, torch.float64)


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
    found = _RowSums(builder, value).of(args[0])
    if found is None or tuple(found.meta["val"].shape) != (*value.shape[:-1], 1):
        return None
    if target is aten.mean.dim:
        found = builder.call(aten.div.Scalar, found, value.shape[-1])
    keepdim = len(args) > 2 and args[2]
    return found if keepdim else builder.call(aten.squeeze.dim, found, last)


def sum_of_row(builder: Builder, source: fx.Node) -> fx.Node | None:
    """The sum of a value over its last dim, which stays with size 1, by the rules above."""
    return _RowSums(builder, source.meta["val"]).of(source)


class _RowSums:
    """The rules, for values of one dtype, device and row shape ``[..., 1]``."""

    def __init__(self, builder: Builder, value: torch.Tensor):
        self.builder, self.call, self.value = builder, builder.call, value
        self.dtype, self.width = value.dtype, value.shape[-1]
        self.row = (*value.shape[:-1], 1)

    def of(self, source: object) -> fx.Node | None:
        """The sum over the last dim: shape ``[..., 1]``, or one element if all rows agree."""
        if not isinstance(source, fx.Node) or source.meta["val"].dtype != self.dtype:
            return None
        elements = self._of_one_hot(source) or self._of_scatter(source)
        if elements is not None or self.dtype not in _FULL_PRECISION:
            # The other rules multiply by V, which rounds in a narrow dtype; a sum does not.
            return elements
        rules = (self._of_constant, self._of_log_softmax, self._of_exponentials, self._of_parts)
        return next((found for rule in rules if (found := rule(source)) is not None), None)

    def _of_constant(self, source: fx.Node) -> fx.Node | None:
        """``V r``."""
        constant = _without_expand(source)
        if constant is None or not self._is_constant_along_row(constant):
            return None
        return self.call(aten.mul.Scalar, constant, self.width)

    def _is_constant_along_row(self, node: fx.Node) -> bool:
        """Whether the node has one element per row, or one element in all."""
        shape = tuple(node.meta["val"].shape)
        return shape == self.row or math.prod(shape) == 1

    def _of_parts(self, source: fx.Node) -> fx.Node | None:
        """The sum of a sum, difference or negation, from the sums of its operands."""
        targets = aten.add.Tensor, aten.sub.Tensor, aten.neg.default
        parts = [self.of(part) for part in _operands(source, *targets)]
        return self.call(source.target, *parts) if parts and None not in parts else None

    # ---- one-hot values -----------------------------------------------------------------------
    def _of_one_hot(self, source: fx.Node) -> fx.Node | None:
        """``a``, or ``a r`` if the one-hot value is multiplied by a factor r.

        All other terms are ``0 * r``, which is added because it is NaN for an r that is not finite.
        """
        for one_hot, factor in _products(source):
            match = self._one_hot(one_hot)
            if match is None:
                continue
            if factor is not None and tuple(factor.meta["val"].shape) != self.row:
                continue
            index, hit = match
            in_bounds = self.call(
                aten.bitwise_and.Tensor,
                self.call(aten.ge.Scalar, index, 0),
                self.call(aten.lt.Scalar, index, self.width),
            )
            zero = self.builder.filled([], 0, self.value)
            if factor is None:
                return self.call(aten.where.self, in_bounds, hit, zero)
            product = self.call(aten.mul.Tensor, hit, factor)
            product = self.call(aten.where.self, in_bounds, product, zero)
            return self.call(aten.add.Tensor, product, self.call(aten.mul.Tensor, factor, zero))
        return None

    def _one_hot(self, node: object) -> tuple[fx.Node, fx.Node] | None:
        """``index`` (one per row) and ``a``, if the node is ``where(index == iota(V), a, 0)``."""
        equal, hit, miss = _operands(node, aten.where.self) or (None,) * 3
        if not _is_call(equal, aten.eq.Tensor) or not linearity.is_zero(miss):
            return None
        if not isinstance(hit, fx.Node) or not self._is_constant_along_row(hit):
            return None
        for index, places in (equal.args, reversed(equal.args)):
            index, places = _without_expand(index), _without_expand(places)
            if index is None or places is None or places.target is not prims.iota.default:
                continue
            counts = places.args == (self.width,) and places.kwargs["start"] == 0
            if counts and places.kwargs["step"] == 1 and tuple(index.meta["val"].shape) == self.row:
                return index, hit
        return None

    def _of_scatter(self, source: fx.Node) -> fx.Node | None:
        """``sum(a)``."""
        base, dim, index, elements = _operands(source, aten.scatter_add.default) or (None,) * 4
        if base is None or not linearity.is_zero(base):
            return None
        last, shape = len(self.row) - 1, tuple(elements.meta["val"].shape)
        if dim not in (-1, last) or shape[:-1] != self.row[:-1]:
            return None
        if shape != tuple(index.meta["val"].shape):
            return None  # some of the elements are not added
        return self._sum(elements)

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
        x, pivot = exponents(source) or (None, None)
        m, infinite = _maximum(pivot)
        if infinite is None or not self._is_maximum(m, x):
            return None
        if _operands(pivot, aten.where.self)[2:] != (m,):
            return None
        shifted = self.call(aten.sub.Tensor, x, m)
        total = self._sum(self.call(aten.exp.default, shifted))
        return self.call(aten.where.self, infinite, self.call(aten.exp.default, m), total)

    def _sum(self, values: fx.Node) -> fx.Node:
        return self.call(aten.sum.dim_IntList, values, [len(self.row) - 1], True)

    def _is_maximum(self, m: object, x: object) -> bool:
        return _is_call(m, aten.amax.default) and m.args[0] is x and self._is_row_reduction(m)

    def _is_row_reduction(self, reduction: fx.Node) -> bool:
        """Whether it reduces the last dim alone, with ``keepdim``."""
        dims = reduction.args[1] if len(reduction.args) > 1 else None
        keeps = tuple(reduction.meta["val"].shape) == self.row
        return (
            keeps and isinstance(dims, list | tuple) and list(dims) in ([-1], [len(self.row) - 1])
        )


def _is_call(node: object, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is target


def _products(source: fx.Node) -> list[tuple[object, fx.Node | None]]:
    """All ways to read the source as a value times a factor; None stands for no factor."""
    found: list[tuple[object, fx.Node | None]] = [(source, None)]
    if source.target is aten.mul.Tensor:
        a, b = source.args
        found += [(x, y) for x, y in ((a, b), (b, a)) if isinstance(y, fx.Node)]
    return found


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
    is_call = isinstance(node, fx.Node) and node.target in targets and not node.kwargs
    return node.args if is_call else ()  # type: ignore[union-attr]


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
    values, pivot = exponents(summed) or (None, None)
    maximum, infinite = _maximum(pivot)
    if maximum is None or maximum.args[0] is not values:
        return None
    value, shape = values.meta["val"], pivot.meta["val"].shape
    dims = reduced_dims(total, value.dim())
    if reduced_dims(maximum, value.dim()) != dims or len(shape) != value.dim():
        return None
    if any(shape[d] != 1 for d in dims):
        return None
    return ExponentialSum(values, maximum, tuple(dims), infinite is not None)


def exponents(exponentials: object) -> tuple[Any, Any] | None:
    """x and m, if the node is ``exp(x - m)``."""
    (shifted,) = _operands(exponentials, aten.exp.default) or (None,)
    values, pivot = _operands(shifted, aten.sub.Tensor) or (None, None)
    return (values, pivot) if isinstance(values, fx.Node) and isinstance(pivot, fx.Node) else None


def _maximum(pivot: object) -> tuple[fx.Node | None, fx.Node | None]:
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
    while isinstance(node, fx.Node) and ops.is_reshape(node):
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
    pivot = call(aten.where.self, infinite, builder.filled([], 0, value), maximum)
    return call(aten.exp.default, call(aten.sub.Tensor, values, pivot))
