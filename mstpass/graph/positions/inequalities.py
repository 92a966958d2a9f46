"""Whether inequalities of integer polynomials can hold together: a proof that they cannot.

A *constraint* is a polynomial that is at least 0. Each monomial counts as a variable of its own, so
the constraints are linear, and Fourier-Motzkin elimination decides whether rational numbers satisfy
them. A constraint is tightened to the integers first: ``2*i - 1 >= 0`` says ``i >= 1``. So the
answer "they cannot" is a proof, and the answer "they may" is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from mstpass.graph.positions.polynomials import Floor, Index, Monomial, Poly, Symbol, atom

Constraints = frozenset[Poly]
_MOST_CONSTRAINTS = 400  # the elimination gives up with more
_Row = tuple[tuple[tuple[Monomial, int], ...], int]  # a sum of variables, plus a number, is >= 0


class _Contradiction(Exception):
    """A constraint without variables that does not hold."""


@lru_cache(maxsize=4096)
def impossible(constraints: Constraints) -> bool:
    """Whether it is proven that no integers satisfy all constraints."""
    try:
        rows = {_tightened(c.coefficients) for c in constraints | _known_of(constraints)}
        _eliminate({row for row in rows if row is not None})
    except _Contradiction:
        return True
    return False


def implied(constraints: Constraints, poly: Poly) -> bool:
    """Whether it is proven that the polynomial is at least 0 where the constraints hold."""
    return impossible(constraints | {negated(poly)})


def negated(constraint: Poly) -> Poly:
    """``p >= 0`` is false exactly where ``-p - 1 >= 0``."""
    return (-constraint).plus(-1)


def _known_of(constraints: Iterable[Poly]) -> set[Poly]:
    """What holds of atoms by their definition."""
    known: set[Poly] = set()
    for one in {a for constraint in constraints for a in constraint.atoms}:
        if isinstance(one, Floor):
            rest = one.numerator - atom(one).times(one.divisor)
            known |= {rest, (-rest).plus(one.divisor - 1)}
        else:
            known.add(atom(one))
    for constraint in constraints:
        for monomial, _ in constraint.terms:
            if len(monomial) > 1 and all(isinstance(a, Index | Symbol) for a in monomial):
                known.add(Poly.of({monomial: 1}))
    return known


def _tightened(coefficients: dict[Monomial, int]) -> _Row | None:
    """The constraint over the integers; None if it always holds."""
    variables = {m: c for m, c in coefficients.items() if m and c}
    number = coefficients.get((), 0)
    if not variables:
        if number < 0:
            raise _Contradiction
        return None
    divisor = math.gcd(*variables.values())
    items = sorted(((m, c // divisor) for m, c in variables.items()), key=str)
    return tuple(items), number // divisor


def _eliminate(rows: set[_Row]) -> None:
    """Eliminate one variable after the other, as long as there are few constraints."""
    while 0 < len(rows) <= _MOST_CONSTRAINTS:
        variable = _cheapest(rows)
        split: dict[int, list[_Row]] = {-1: [], 0: [], 1: []}
        for row in rows:
            coefficient = dict(row[0]).get(variable, 0)
            split[(coefficient > 0) - (coefficient < 0)].append(row)
        combined = {_combined(low, high, variable) for low in split[1] for high in split[-1]}
        rows = _strongest(set(split[0]) | {row for row in combined if row is not None})


def _cheapest(rows: set[_Row]) -> Monomial:
    """The variable whose elimination makes the fewest constraints; quotients come last.

    A bound on what is divided is a bound on the quotient, which is tightened to an integer.
    """
    counts: dict[Monomial, list[int]] = {}
    for row, _ in rows:
        for variable, coefficient in row:
            counts.setdefault(variable, [0, 0])[coefficient > 0] += 1

    def cost(variable: Monomial) -> tuple[bool, int, str]:
        negative, positive = counts[variable]
        is_quotient = any(isinstance(one, Floor) for one in variable)
        return is_quotient, negative * positive, str(variable)

    return min(counts, key=cost)


def _combined(lower: _Row, upper: _Row, variable: Monomial) -> _Row | None:
    """The sum of multiples of two constraints in which the variable has coefficient 0."""
    a, b = dict(lower[0])[variable], -dict(upper[0])[variable]
    total: dict[Monomial, int] = {(): b * lower[1] + a * upper[1]}
    for factor, (row, _) in ((b, lower), (a, upper)):
        for other, coefficient in row:
            total[other] = total.get(other, 0) + factor * coefficient
    return _tightened(total)


def _strongest(rows: set[_Row]) -> set[_Row]:
    """Of constraints that differ in the number alone, the one that implies the others."""
    numbers: dict[tuple[tuple[Monomial, int], ...], int] = {}
    for row, number in rows:
        numbers[row] = min(number, numbers.get(row, number))
    return set(numbers.items())
