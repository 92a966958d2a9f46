"""Row sums without a pass over the row of their own, or with one that another sum makes anyway.

With V elements in a row, r and a the same for the whole row:

    sum(r)                             =  V r
    sum(where(index == v, a, 0) r)     =  a r where 0 <= index < V, else 0
    sum(x +- y), sum(-x)               =  sum(x) +- sum(y), -sum(x)      where both are known
    sum(log_softmax(x))                =  sum(x - m) - V log(sum(exp(x - m)))         m = max(x)
    sum(exp(x - where(|m| = inf, 0, m)))  =  where(|m| = inf, exp(m), sum(exp(x - m)))

The first three give the row sum of the gradient that enters a log-softmax, under cross-entropy with
and without label smoothing; the fourth is what label smoothing adds up, with no cancellation (no
x - m is positive, the logarithm never negative), in the pass that adds up the exponentials; the
last lets ``logsumexp`` share that pass too. It is exact: with m = inf both sums are inf, with
m = -inf both are 0, and where m is NaN both are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.builder import Builder

aten = torch.ops.aten
prims = torch.ops.prims
_FULL_PRECISION = (torch.float32, torch.float64)


def row_sum(
    builder: Builder, target: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> fx.Node | None:
    """The call, a sum or mean over the last dim, in such a form; None where there is none."""
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


class _RowSums:
    def __init__(self, builder: Builder, value: torch.Tensor):
        self.call, self.dtype, self.device = builder.call, value.dtype, value.device
        self.width = value.shape[-1]
        self.row = (*value.shape[:-1], 1)

    def of(self, source: object) -> fx.Node | None:
        """The row sum, of shape ``[..., 1]`` or one for all rows."""
        if not isinstance(source, fx.Node) or source.meta["val"].dtype != self.dtype:
            return None
        picked = self._of_one_hot(source)
        if picked is not None or self.dtype not in _FULL_PRECISION:
            return picked  # V r would be rounded to a narrow type where a sum is not
        rules = (self._of_constant, self._of_log_softmax, self._of_exponentials, self._of_parts)
        return next((found for rule in rules if (found := rule(source)) is not None), None)

    def _of_constant(self, source: fx.Node) -> fx.Node | None:
        behind = _unexpanded(source)
        if behind is None or not self._is_row(behind):
            return None
        return self.call(aten.mul.Scalar, behind, self.width)

    def _is_row(self, node: fx.Node) -> bool:
        """The same along the row: one value a row, or one for all."""
        shape = tuple(node.meta["val"].shape)
        return shape == self.row or math.prod(shape) == 1

    def _of_parts(self, source: fx.Node) -> fx.Node | None:
        if source.target not in (aten.add.Tensor, aten.sub.Tensor, aten.neg.default):
            return None
        if source.kwargs:
            return None
        parts = []
        for part in source.args:
            total = self.of(part)
            if total is None:
                return None
            parts.append(total)
        return self.call(source.target, *parts)

    # ---- one-hot values -----------------------------------------------------------------------
    def _of_one_hot(self, source: fx.Node) -> fx.Node | None:
        """Of ``where(index == v, a, 0)``, or of that times a row's factor.

        All terms but one are ``0 * factor``, which is added for a factor that is not finite.
        """
        for one_hot, factor in _products(source):
            match = self._one_hot(one_hot)
            if match is None:
                continue
            if factor is not None and tuple(factor.meta["val"].shape) != self.row:
                continue
            index, hit = match
            inside = self.call(
                aten.bitwise_and.Tensor,
                self.call(aten.ge.Scalar, index, 0),
                self.call(aten.lt.Scalar, index, self.width),
            )
            zero = self.call(aten.full.default, [], 0, dtype=self.dtype, device=self.device)
            if factor is None:
                return self.call(aten.where.self, inside, hit, zero)
            picked = self.call(aten.mul.Tensor, hit, factor)
            picked = self.call(aten.where.self, inside, picked, zero)
            return self.call(aten.add.Tensor, picked, self.call(aten.mul.Tensor, factor, zero))
        return None

    def _one_hot(self, node: object) -> tuple[fx.Node, fx.Node] | None:
        """``where(index == iota(width), a, 0)``: its ``index`` of a row's shape, and ``a``."""
        if not _is_call(node, aten.where.self):
            return None
        equal, hit, miss = node.args
        if not _is_call(equal, aten.eq.Tensor) or not op_table.is_zero(miss):
            return None
        if not isinstance(hit, fx.Node) or not self._is_row(hit):
            return None
        for index, places in (equal.args, reversed(equal.args)):
            index, places = _unexpanded(index), _unexpanded(places)
            if index is None or places is None or places.target is not prims.iota.default:
                continue
            counts = places.args == (self.width,) and places.kwargs["start"] == 0
            if counts and places.kwargs["step"] == 1 and tuple(index.meta["val"].shape) == self.row:
                return index, hit
        return None

    # ---- softmax ------------------------------------------------------------------------------
    def _of_log_softmax(self, source: fx.Node) -> fx.Node | None:
        if not _is_call(source, aten.sub.Tensor) or source.kwargs:
            return None
        shifted, log = source.args
        if not (_is_call(log, aten.log.default) and self._is_shifted(shifted)):
            return None
        total = log.args[0]
        if not (_is_call(total, aten.sum.dim_IntList) and self._is_over_the_row(total)):
            return None
        if not (_is_call(total.args[0], aten.exp.default) and total.args[0].args[0] is shifted):
            return None
        constant = self.call(aten.mul.Scalar, log, self.width)
        return self.call(aten.sub.Tensor, self._sum(shifted), constant)

    def _of_exponentials(self, source: fx.Node) -> fx.Node | None:
        if not _is_call(source, aten.exp.default) or not _is_call(source.args[0], aten.sub.Tensor):
            return None
        x, guarded = source.args[0].args
        if not _is_call(guarded, aten.where.self) or source.args[0].kwargs:
            return None
        infinite, zero, m = guarded.args
        if not (op_table.is_zero(zero) and _is_call(infinite, aten.eq.Scalar)):
            return None
        magnitude, bound = infinite.args
        if not (_is_call(magnitude, aten.abs.default) and magnitude.args[0] is m):
            return None
        if bound != math.inf or not self._is_maximum(m, x):
            return None
        shifted = self.call(aten.sub.Tensor, x, m)
        total = self._sum(self.call(aten.exp.default, shifted))
        return self.call(aten.where.self, infinite, self.call(aten.exp.default, m), total)

    def _sum(self, wide: fx.Node) -> fx.Node:
        return self.call(aten.sum.dim_IntList, wide, [len(self.row) - 1], True)

    def _is_shifted(self, node: object) -> TypeGuard[fx.Node]:
        """``x - max(x)``."""
        if not _is_call(node, aten.sub.Tensor) or node.kwargs:
            return False
        x, m = node.args
        return self._is_maximum(m, x)

    def _is_maximum(self, m: object, x: object) -> bool:
        return _is_call(m, aten.amax.default) and m.args[0] is x and self._is_over_the_row(m)

    def _is_over_the_row(self, reduction: fx.Node) -> bool:
        """A reduction over the last dim that stays as one of size 1."""
        dims = reduction.args[1] if len(reduction.args) > 1 else None
        keeps = tuple(reduction.meta["val"].shape) == self.row
        return (
            keeps and isinstance(dims, list | tuple) and list(dims) in ([-1], [len(self.row) - 1])
        )


def _is_call(node: object, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is target


def _products(source: fx.Node) -> list[tuple[object, fx.Node | None]]:
    """The source as one-hot value and factor, in every way that it may be one."""
    found: list[tuple[object, fx.Node | None]] = [(source, None)]
    if source.target is aten.mul.Tensor:
        a, b = source.args
        found += [(x, y) for x, y in ((a, b), (b, a)) if isinstance(y, fx.Node)]
    return found


def _unexpanded(node: object) -> fx.Node | None:
    """The value behind expands, and behind the reshape of an iota to a row."""
    while isinstance(node, fx.Node):
        behind = node.args[0] if node.args else None
        expands = node.target is aten.expand.default
        row = node.target is aten.reshape.default and isinstance(behind, fx.Node)
        if not (expands or (row and behind.target is prims.iota.default)):  # type: ignore[union-attr]
            return node
        node = behind
    return None
