"""A tensor that is known at every position: polynomials of its indices, one for each part of it.

The parts are given by constraints. They do not overlap, and together they are the whole tensor:

    cat([zeros(1), arange(N)])      0 where -i0 >= 0,   i0 - 1 where i0 - 1 >= 0

Booleans are 0 and 1. A number that is no integer, such as minus infinity, is a ``float``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mstpass.graph.positions.inequalities import (
    Constraints,
    implied,
    impossible,
    negated,
)
from mstpass.graph.positions.polynomials import Index, Poly, TooComplicated, const, index

MOST_PARTS = 48
Number = Poly | float
Shape = tuple[Poly, ...]
Cases = Iterable[tuple[tuple[Poly, ...], Number]]  # constraints in addition, and the value there
EVERYWHERE: Constraints = frozenset()


@dataclass(frozen=True)
class Part:
    where: Constraints
    number: Number


@dataclass(frozen=True)
class Pieces:
    """The tensor of this shape."""

    shape: Shape
    parts: tuple[Part, ...]

    @property
    def domain(self) -> Constraints:
        return domain(self.shape)

    @property
    def only(self) -> Number:
        """The number that all of the tensor is.

        Raises:
            TooComplicated: there are several.
        """
        if len(self.parts) != 1:
            raise TooComplicated("a value that is one expression is needed")
        return self.parts[0].number

    def depends_on(self, dim: int) -> bool:
        one = Index(dim)
        polys = [*(c for part in self.parts for c in part.where)]
        polys += [part.number for part in self.parts if isinstance(part.number, Poly)]
        return any(one in poly.atoms for poly in polys)


def domain(shape: Shape) -> Constraints:
    """The positions of a tensor."""
    dims = [index(d) for d in range(len(shape))]
    last = [size.plus(-1) - dim for size, dim in zip(shape, dims, strict=True)]
    return frozenset(dims) | frozenset(last)


def whole(shape: Shape, number: Number) -> Pieces:
    return Pieces(shape, (Part(EVERYWHERE, number),))


def of_parts(shape: Shape, parts: Iterable[Part]) -> Pieces:
    """The tensor without parts that are empty; neighbours that agree are one part.

    Raises:
        TooComplicated: there are too many parts.
    """
    room = domain(shape)
    left = []
    for part in parts:
        where = _reduced(room, part.where)
        if where is not None:
            left.append(Part(where, part.number))
        if len(left) > MOST_PARTS:
            raise TooComplicated(f"a value with more than {MOST_PARTS} parts")
    return Pieces(shape, tuple(_merged(room, left)))


def _reduced(room: Constraints, where: Constraints) -> Constraints | None:
    """The constraints without those that follow from the others; None if none can hold."""
    if impossible(room | where):
        return None
    for constraint in sorted(where, key=str):
        others = where - {constraint}
        if implied(room | others, constraint):
            where = others
    return where


def _merged(room: Constraints, parts: list[Part]) -> list[Part]:
    numbers = list(dict.fromkeys(part.number for part in parts))
    for number in numbers:
        if all(_equal(room | part.where, part.number, number) for part in parts):
            return [Part(EVERYWHERE, number)]
    merged = True
    while merged:
        merged = False
        for a in parts:
            for b in parts:
                joined = None if a is b else _joined(room, a, b)
                if joined is not None:
                    parts = [p for p in parts if p is not a and p is not b] + [joined]
                    merged = True
                    break
            if merged:
                break
    return parts


def _joined(room: Constraints, a: Part, b: Part) -> Part | None:
    """Two parts that differ in the side of one constraint, as one; ``b``'s number holds in both."""
    if len(a.where) != len(b.where) or len(a.where - b.where) != 1:
        return None
    (mine,), (theirs,) = a.where - b.where, b.where - a.where
    if negated(mine) != theirs or not _equal(room | a.where, a.number, b.number):
        return None
    return Part(a.where & b.where, b.number)


def _equal(where: Constraints, a: Number, b: Number) -> bool:
    if a == b:
        return True
    if not isinstance(a, Poly) or not isinstance(b, Poly):
        return False
    return implied(where, a - b) and implied(where, b - a)


def broadcast(value: Pieces, shape: Shape) -> Pieces:
    """The value as an operand of this larger shape."""
    missing = len(shape) - len(value.shape)
    indices = [
        const(0) if size == const(1) else index(missing + d) for d, size in enumerate(value.shape)
    ]
    return read(value, shape, indices)


def read(value: Pieces, shape: Shape, indices: Sequence[Poly]) -> Pieces:
    """A tensor of this shape, each element of which is the value's at ``indices``."""
    return of_parts(shape, parts_at(value, indices))


def parts_at(value: Pieces, indices: Sequence[Poly], where: Constraints = EVERYWHERE) -> list[Part]:
    """The value's parts at ``indices``, which lie in the value where the constraints hold."""
    mapping = {Index(d): poly for d, poly in enumerate(indices)}
    found = []
    for part in value.parts:
        held = frozenset(constraint.substitute(mapping) for constraint in part.where)
        number = part.number
        moved = number.substitute(mapping) if isinstance(number, Poly) else number
        found.append(Part(where | held, moved))
    return found


def mapped(shape: Shape, operands: Sequence[Pieces], of: Callable[..., Cases]) -> Pieces:
    """The result of an op that computes each element from the same elements of its operands."""
    room = domain(shape)
    rows: list[tuple[Constraints, tuple[Number, ...]]] = [(EVERYWHERE, ())]
    for operand in operands:
        parts = broadcast(operand, shape).parts
        rows = [
            (where | part.where, (*numbers, part.number))
            for where, numbers in rows
            for part in parts
            if not (where and part.where and impossible(room | where | part.where))
        ]
        if len(rows) > MOST_PARTS:
            raise TooComplicated(f"a value with more than {MOST_PARTS} parts")
    found = []
    for where, numbers in rows:
        found += [Part(where | frozenset(more), n) for more, n in of(*numbers)]
    return of_parts(shape, found)


def chosen(condition: Pieces, yes: Pieces, no: Pieces, shape: Shape) -> Pieces:
    """``where(condition, yes, no)``: the side that is not chosen makes no parts."""
    room = domain(shape)
    found = []
    sides = [broadcast(side, shape) for side in (no, yes)]
    for part in broadcast(condition, shape).parts:
        assert isinstance(part.number, Poly) and part.number.constant in (0, 1), "it is 0 or 1"
        for other in sides[part.number.constant].parts:
            where = part.where | other.where
            if not impossible(room | where):
                found.append(Part(where, other.number))
    return of_parts(shape, found)


def split_by(shape: Shape, constraints: Iterable[Poly], inside: Number, outside: Number) -> Pieces:
    """``inside`` where all constraints hold, ``outside`` elsewhere."""
    found, held = [], EVERYWHERE
    for constraint in sorted(constraints, key=str):
        found.append(Part(held | {negated(constraint)}, outside))
        held = held | {constraint}
    return of_parts(shape, [*found, Part(held, inside)])
