"""Symbolic sizes: how to compare and count them without a guard.

Under ``dynamic=True``, or from a second sequence length on, a size is a ``SymInt``: an expression
such as ``s77*s27`` of the symbols of the inputs' sizes. The comparison ``a == b`` of two of them
may install a guard: torch then compiles the graph again for inputs for which the answer differs. So
the passes never compare symbolic sizes themselves, but two kinds of plain ints:

    generic  the value of the size at one fixed point, the *generic point*. There each symbol is a
             large number of its own, except that equalities hold on which the graph is guarded
             anyway, such as ``s0*(s1 - 1) == s2*(s3 - 1)`` of logits and labels. Two sizes that are
             equal there are equal for every batch, barring a coincidence, which the checks of a
             chunk's shapes would find. Decisions about structure use this value.
    hint     the value of the size in the batch at hand: the one with which the graph was traced, or
             the one that is planned for (torch_internals/batch_sizes.py). A number of rows that
             the data decides has none, and is taken at its most. Estimates of bytes and time use
             this value.

A *size node* is a node whose value is a ``SymInt``: a placeholder, or arithmetic on placeholders.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mstpass.torch_internals.batch_sizes import has_hint, most
from mstpass.torch_internals.batch_sizes import hint as hint  # for all that counts sizes

Size = int | torch.SymInt
# Scores of batch x heads x length x length have fewer than 2^63 bytes, even where the batch is a
# multiple of the length.
_LEAST_GENERIC = 2**12
_INTS = frozenset({int})


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a symbolic size."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def is_static(value: torch.Tensor) -> bool:
    """Whether every size is a plain int."""
    return _all_ints(value.shape)


def _all_ints(sizes: Iterable[Size]) -> bool:
    return _INTS.issuperset(map(type, sizes))


def expression(size: Size) -> sympy.Expr:
    """The size as a sympy expression of the symbols."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def generic(size: Size) -> int:
    """The value of the size at the generic point."""
    if isinstance(size, int):
        return size
    environment = size.node.shape_env
    return _generic_point(environment, len(environment.guards)).value(expression(size))


class _GenericPoint:
    """A value for each symbol, such that given equalities between products hold.

    Their factors are symbols, of which one can be solved for, or sums.
    """

    def __init__(self, equalities: Iterable[sympy.Eq]):
        self.known: dict[sympy.Expr, int] = {}
        self.odd: dict[sympy.Symbol, int] = {}  # a number of its own for each symbol
        self.solved: dict[sympy.Symbol, sympy.Expr] = {}
        for equality in equalities:
            self._solve((equality.lhs / equality.rhs).subs(self.solved))
        # A solution such as s2 = s0*s1/s3 is an integer if the value of s0 is a multiple of s3's.
        self.factors: dict[sympy.Symbol, int] = {}
        for numerator, denominator in map(sympy.fraction, self.solved.values()):
            multiples = [base for base in numerator.as_powers_dict() if base.is_Symbol]
            if denominator != 1 and multiples:
                multiple = min(multiples, key=str)
                factor = int(self._evaluate(denominator))
                self.factors[multiple] = math.lcm(factor, self.factors.get(multiple, 1))
        if not all(self._evaluate(solution).is_Integer for solution in self.solved.values()):
            self.solved, self.factors = {}, {}

    def value(self, expr: sympy.Expr) -> int:
        if expr not in self.known:
            self.known[expr] = int(self._evaluate(expr.subs(self.solved)))
        return self.known[expr]

    def _solve(self, ratio: sympy.Expr) -> None:
        """Solve "this product of powers is 1" for one of its symbols, if that is possible."""
        powers = ratio.as_powers_dict()
        if not all(base.is_Symbol or base.is_number or base.is_Add for base in powers):
            return
        in_sums = {s for base in powers if base.is_Add for s in base.free_symbols}
        symbols = ratio.free_symbols - in_sums
        for symbol in sorted(symbols, key=str):
            if abs(powers[symbol]) == 1 and len(symbols) > 1:
                solution = (ratio / symbol ** powers[symbol]) ** -powers[symbol]
                self.solved = {s: e.subs(symbol, solution) for s, e in self.solved.items()}
                self.solved[symbol] = solution
                return

    def _evaluate(self, expr: sympy.Expr) -> sympy.Expr:
        return expr.xreplace({s: sympy.Integer(self._symbol_value(s)) for s in expr.free_symbols})

    def _symbol_value(self, symbol: sympy.Symbol) -> int:
        if symbol not in self.odd:
            taken = set(self.odd.values())
            odd = _LEAST_GENERIC + zlib.crc32(symbol.name.encode()) % _LEAST_GENERIC | 1
            self.odd[symbol] = next(n for n in itertools.count(odd, 2) if n not in taken)
        return self.odd[symbol] * self.factors.get(symbol, 1)


@functools.lru_cache(maxsize=1)
def _generic_point(environment: ShapeEnv, num_guards: int) -> _GenericPoint:
    """The generic point of a graph's symbols. A new guard makes a new one, hence ``num_guards``."""
    expressions = [guard.expr for guard in environment.guards[:num_guards]]
    return _GenericPoint(e for e in expressions if isinstance(e, sympy.Eq))


def generic_shape(value: torch.Tensor) -> torch.Size:
    shape = value.shape
    return shape if _all_ints(shape) else torch.Size(map(generic, shape))


def outer_to_inner(value: torch.Tensor) -> list[int]:
    """The dims in the order in which they lie in memory."""
    strides = generic_stride(value)
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def fills_memory(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory, each once, with the dims in this order."""
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def generic_numel(value: torch.Tensor) -> int:
    count = value.numel()
    return count if type(count) is int else math.prod(generic_shape(value))


def generic_stride(value: torch.Tensor) -> list[int]:
    return list(map(generic, value.stride()))


def hint_shape(value: torch.Tensor) -> list[int]:
    return list(map(hint, value.shape))


def hint_numel(value: torch.Tensor) -> int:
    count = value.numel()
    return count if type(count) is int else math.prod(hint_shape(value))


def is_bounded(value: torch.Tensor) -> bool:
    """Whether no batch has a larger tensor here than the batch at hand."""
    bounds = ((most(size), hint(size)) for size in value.shape)
    return all(bound is not None and bound <= size for bound, size in bounds)


def depends_on_data(value: torch.Tensor) -> bool:
    """Whether a size of the tensor depends on data, and nothing is known of how large it may be.

    Of the rows that a mask selects it is known: there are no more than the mask has elements.
    """
    shape = value.shape
    return not _all_ints(shape) and not all(map(has_hint, shape))


def symbols_of(value: object) -> set[sympy.Symbol]:
    """The symbols in a size, or in the sizes, the strides and the offset of a tensor."""
    if not isinstance(value, torch.Tensor):
        return set(expression(value).free_symbols) if isinstance(value, torch.SymInt) else set()
    layout = (*value.shape, *value.stride(), value.storage_offset())
    return {symbol for size in layout for symbol in expression(size).free_symbols}


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    """Whether two shapes are equal for every batch."""
    return list(map(generic, a)) == list(map(generic, b))
