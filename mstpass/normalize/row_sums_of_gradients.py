"""The sum of a gradient over a row of the vocabulary is made of sums that the forward knows.

The gradient of a log-softmax reads the sum of each row of the gradient that enters it. Let that
gradient be a sum of products, each of a factor r with one element per row, which the backward
brings, and a value w that only depends on the forward::

    sum over v of (r1 w1[v] + r2 w2[v] + ...)  =  r1 sum(w1) + r2 sum(w2) + ...

The sums of w are found where the forward has the row at hand. What is left reads one number per
row, so that a loop over sections of the vocabulary needs no other section (loops/sections.py). Some
sums have a closed form (graph/row_sums.py): that of a label's gradient is its one element.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.row_sums import sum_of_row
from mstpass.graph.sizes import same_shape, symbols_of
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import CannotTake
from mstpass.normalize.token_window import downstream

aten = torch.ops.aten
_FULL_PRECISION = (torch.float32, torch.float64)
_MOST_TERMS = 6


def row_sums_of_gradients(joint: JointGraph) -> Rewritten:
    """A copy of the graph with such sums; the graph itself if it has none."""
    return rewritten(joint, (n for n in joint.nodes if _is_row_sum(joint, n)), _by_terms)


def _by_terms(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    (source,) = node.all_input_nodes
    total = _Terms(rewriting.builder, rewriting.joint.backward, source).total()
    if argument(node, "keepdim"):
        return total
    return rewriting.builder.call(aten.squeeze.dim, total, source.meta["val"].dim() - 1)


def _is_row_sum(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node sums the rows of a gradient that a product of the forward leads to."""
    if node.target is not aten.sum.dim_IntList or node not in joint.backward or node.kwargs:
        return False
    known = joint.cached(downstream)
    (source,) = node.all_input_nodes
    value, dims = value_of(source), node.args[1]
    if value is None or value.dim() < 2 or not isinstance(dims, list | tuple):
        return False
    last = value.dim() - 1
    if [d % value.dim() for d in dims] != [last] or symbols_of(value.shape[last]):  # type: ignore[operator]
        return False
    of_row = [n for user in node.users for n in user.all_input_nodes if n in known]
    shapes = [(n, other.shape) for n in of_row if (other := value_of(n)) is not None]
    return any(
        last not in known[n][0] and same_shape(shape[-1:], value.shape[-1:]) for n, shape in shapes
    )


class _Term(NamedTuple):
    """A product of a number per row and a value of the forward; None stands for 1."""

    factor: fx.Node | None
    row: fx.Node | None


class _Terms:
    """The terms of one gradient, a value of the backward."""

    def __init__(self, builder: Builder, backward: set[fx.Node], source: fx.Node):
        self.builder, self.call, self.backward = builder, builder.call, backward
        self.source = source
        self.refusal = CannotTake(source, "is no sum of products of rows and numbers")

    def total(self) -> fx.Node:
        """The sum of each row, ``[..., 1]``.

        Raises:
            CannotTake: the source is no sum of such products.
        """
        parts = self._parts(self.source)
        found = parts[0]
        for part in parts[1:]:
            found = self.call(aten.add.Tensor, found, part)
        if not same_shape(found.meta["val"].shape, [*self.source.meta["val"].shape[:-1], 1]):
            raise self.refusal
        return found

    def _parts(self, source: fx.Node) -> list[fx.Node]:
        """What the row sums of a value add up."""
        closed = sum_of_row(self.builder, source)
        if closed is not None:
            return [closed]
        if source.target is aten.add.Tensor and _has_two_operands(source):
            return [part for operand in source.args for part in self._parts(operand)]  # type: ignore[arg-type]
        return [self._sum(term, source.meta["val"]) for term in self.of(source)]

    def _sum(self, term: _Term, like: torch.Tensor) -> fx.Node:
        if term.row is None:
            assert term.factor is not None, "the factor is known"
            return self.call(aten.mul.Scalar, term.factor, like.shape[-1])
        total = self.call(aten.sum.dim_IntList, term.row, [-1], True)
        return total if term.factor is None else self.call(aten.mul.Tensor, total, term.factor)

    # ---- terms ---------------------------------------------------------------------------------
    def of(self, node: object) -> list[_Term]:
        """The terms of a value.

        Raises:
            CannotTake: it has none, or too many.
        """
        if not isinstance(node, fx.Node) or value_of(node) is None:
            raise self.refusal
        value = node.meta["val"]
        if value.dtype not in _FULL_PRECISION:
            raise self.refusal
        if value.dim() == 0 or value.shape[-1] == 1:
            return [_Term(node, None)]
        if node not in self.backward:
            return [_Term(None, node)]
        found = self._of_call(node)
        if len(found) > _MOST_TERMS:
            raise self.refusal
        return found

    def _of_call(self, node: fx.Node) -> list[_Term]:
        target = node.target
        if target is aten.expand.default:
            return self.of(node.args[0])
        if target is aten.neg.default:
            return self._each(self.of(node.args[0]), aten.neg.default)
        if ops.is_view_by_shape(node):
            return self._viewed(node)
        if target is aten.where.self:
            return self._chosen(node)
        if not _has_two_operands(node):
            raise self.refusal
        left, right = node.args
        if target is aten.add.Tensor:
            return [*self.of(left), *self.of(right)]
        if target is aten.sub.Tensor:
            return [*self.of(left), *self._each(self.of(right), aten.neg.default)]
        if target is aten.mul.Tensor:
            if not isinstance(right, fx.Node):
                return self._each(self.of(left), aten.mul.Tensor, right)
            return [
                self._product(a, b) for a, b in itertools.product(self.of(left), self.of(right))
            ]
        if target is aten.div.Tensor:
            return self._quotient(self.of(left), right)
        raise self.refusal

    def _each(self, terms: list[_Term], target: object, *args: object) -> list[_Term]:
        """A function of one factor of each term."""
        return [
            _Term(self.call(target, term.factor, *args), term.row)
            if term.factor is not None
            else _Term(None, self.call(target, term.row, *args))
            for term in terms
        ]

    def _product(self, left: _Term, right: _Term) -> _Term:
        pairs = zip(left, right, strict=True)
        return _Term(*(self._both(a, b) for a, b in pairs))

    def _both(self, left: fx.Node | None, right: fx.Node | None) -> fx.Node | None:
        if left is None or right is None:
            return right if left is None else left
        return self.call(aten.mul.Tensor, left, right)

    def _quotient(self, terms: list[_Term], divisor: object) -> list[_Term]:
        if not isinstance(divisor, fx.Node):
            return self._each(terms, aten.div.Tensor, divisor)
        divisors = self.of(divisor)
        if len(divisors) != 1:
            raise self.refusal
        one = aten.reciprocal.default
        inverse = _Term(*(None if n is None else self.call(one, n) for n in divisors[0]))
        return [self._product(term, inverse) for term in terms]

    def _chosen(self, node: fx.Node) -> list[_Term]:
        """``where(condition, x, 0)``, or with 0 and x changed, for a condition of the forward."""
        condition, hit, miss = node.args
        if not isinstance(condition, fx.Node) or condition in self.backward:
            raise self.refusal
        hits = linearity.is_zero(miss)
        if not hits and not linearity.is_zero(hit):
            raise self.refusal
        zero, one = (self.builder.filled([], n, node.meta["val"]) for n in (0, 1))
        found = []
        for factor, row in self.of(hit if hits else miss):
            if condition.meta["val"].shape[-1] == 1 and factor is not None:
                pair = (factor, zero) if hits else (zero, factor)
                found.append(_Term(self.call(aten.where.self, condition, *pair), row))
            else:
                inner = one if row is None else row
                pair = (inner, zero) if hits else (zero, inner)
                found.append(_Term(factor, self.call(aten.where.self, condition, *pair)))
        return found

    def _viewed(self, node: fx.Node) -> list[_Term]:
        """The terms of a view that keeps the rows."""
        source, shape = node.args
        assert isinstance(source, fx.Node) and isinstance(shape, list | tuple), "a node and a list"
        if source.meta["val"].shape[-1:] != node.meta["val"].shape[-1:]:
            raise self.refusal
        found = []
        for factor, row in self.of(source):
            if factor is not None and factor.meta["val"].dim() > 0:
                rows = [*source.meta["val"].shape[:-1], 1]
                if any(map(symbols_of, rows)):
                    raise self.refusal
                factor = self.call(aten.expand.default, factor, rows)
                factor = self.call(aten.reshape.default, factor, [*shape[:-1], 1])
            if row is not None:
                row = self.call(aten.expand.default, row, list(source.meta["val"].shape))
                row = self.call(aten.reshape.default, row, list(shape))
            found.append(_Term(factor, row))
        return found


def _has_two_operands(node: fx.Node) -> bool:
    return len(node.args) == 2 and not node.kwargs
