"""Integer polynomials in the indices of a tensor and in symbolic sizes.

An *atom* is an ``Index`` (the position along a dim), a ``Symbol`` (a size that varies from batch to
batch) or a ``Floor`` (the quotient of a polynomial by a positive constant, rounded down). Two
polynomials that are equal as such are equal for every index and size; the reverse need not hold
where a ``Floor`` is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy

from mstpass.graph.sizes import Size, expression

MOST_DEGREE = 3


class TooComplicated(Exception):
    """A value has no form here; the message says why."""


@dataclass(frozen=True)
class Index:
    """The position along a dim of the tensor that the polynomial describes."""

    dim: int

    def __str__(self) -> str:
        return f"i{self.dim}"


@dataclass(frozen=True)
class Symbol:
    """A size that is known when the step runs. It is at least 0."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Floor:
    """``numerator // divisor``, rounded towards minus infinity."""

    numerator: Poly
    divisor: int

    def __str__(self) -> str:
        return f"({self.numerator})//{self.divisor}"


Atom = Index | Symbol | Floor
Monomial = tuple[Atom, ...]  # sorted; empty: the constant term


@dataclass(frozen=True)
class Poly:
    """A sum of monomials with integer coefficients, none of which is 0."""

    terms: frozenset[tuple[Monomial, int]]

    @staticmethod
    def of(terms: Mapping[Monomial, int]) -> Poly:
        return Poly(frozenset((monomial, c) for monomial, c in terms.items() if c))

    @cached_property
    def coefficients(self) -> dict[Monomial, int]:
        return dict(self.terms)

    @property
    def constant(self) -> int | None:
        """The value of a polynomial without atoms; None of any other."""
        return self.coefficients.get((), 0) if self.terms <= {((), self.offset)} else None

    @property
    def offset(self) -> int:
        """The constant term."""
        return self.coefficients.get((), 0)

    @cached_property
    def atoms(self) -> frozenset[Atom]:
        """All atoms, those within a ``Floor`` too."""
        found: set[Atom] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                found.add(atom)
                if isinstance(atom, Floor):
                    found |= atom.numerator.atoms
        return frozenset(found)

    def __add__(self, other: Poly) -> Poly:
        total = dict(self.terms)
        for monomial, coefficient in other.terms:
            total[monomial] = total.get(monomial, 0) + coefficient
        return Poly.of(total)

    def __neg__(self) -> Poly:
        return self.times(-1)

    def __sub__(self, other: Poly) -> Poly:
        return self + -other

    def times(self, factor: int) -> Poly:
        return Poly.of({monomial: factor * c for monomial, c in self.terms})

    def plus(self, number: int) -> Poly:
        return self + const(number)

    def __mul__(self, other: Poly) -> Poly:
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = tuple(sorted((*left, *right), key=str))
                if len(monomial) > MOST_DEGREE:
                    raise TooComplicated("a product of more than three indices and sizes")
                total[monomial] = total.get(monomial, 0) + a * b
        return Poly.of(total)

    def substitute(self, values: Mapping[Index, Poly]) -> Poly:
        """The polynomial with polynomials in the place of indices."""
        if self.atoms.isdisjoint(values):
            return self
        total = const(0)
        for monomial, coefficient in self.terms:
            product = const(coefficient)
            for atom in monomial:
                product = product * _substituted(atom, values)
            total = total + product
        return total

    def __str__(self) -> str:
        terms = sorted((("*".join(map(str, m)), c) for m, c in self.terms), key=str)
        return " + ".join(f"{c}*{m}" if m else str(c) for m, c in terms) or "0"


def const(number: int) -> Poly:
    return Poly.of({(): number})


def atom(one: Atom) -> Poly:
    return Poly.of({(one,): 1})


def index(dim: int) -> Poly:
    return atom(Index(dim))


def _substituted(one: Atom, values: Mapping[Index, Poly]) -> Poly:
    if isinstance(one, Index):
        return values.get(one, atom(one))
    if isinstance(one, Floor):
        return floor_of(one.numerator.substitute(values), one.divisor)
    return atom(one)


def floor_of(numerator: Poly, divisor: int) -> Poly:
    """``numerator // divisor``; what the divisor divides leaves the ``Floor``."""
    whole = {monomial: c // divisor for monomial, c in numerator.terms if c % divisor == 0}
    whole[()] = numerator.offset // divisor
    rest = numerator - Poly.of(whole).times(divisor)
    if rest.constant is not None:  # it is at least 0 and less than the divisor
        return Poly.of(whole)
    return Poly.of(whole) + atom(Floor(rest, divisor))


def of_size(size: Size) -> Poly:
    """A size of a tensor; a symbolic one that is no sum of products counts as a symbol."""
    return _of_expression(expression(size))


def _of_expression(expr: sympy.Expr) -> Poly:
    if isinstance(expr, sympy.Integer):
        return const(int(expr))
    if expr.is_Add or expr.is_Mul:
        parts = list(map(_of_expression, expr.args))
        total = parts[0]
        for part in parts[1:]:
            total = total + part if expr.is_Add else total * part
        return total
    return atom(Symbol(str(expr)))


def total(polys: Iterable[Poly]) -> Poly:
    result = const(0)
    for poly in polys:
        result = result + poly
    return result
