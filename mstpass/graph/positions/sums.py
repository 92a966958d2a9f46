"""Sums along a dim of values that do not change along it, but for where they begin and end."""

from __future__ import annotations

from functools import partial

from mstpass.graph.positions.calls import Call, Rule
from mstpass.graph.positions.inequalities import Constraints, negated
from mstpass.graph.positions.pieces import (
    Cases,
    Number,
    Part,
    Pieces,
    mapped,
    of_parts,
    read,
    whole,
)
from mstpass.graph.positions.pointwise import is_true, logical_not
from mstpass.graph.positions.polynomials import Index, Poly, TooComplicated, const, index


def running_sum(value: Pieces, dim: int) -> Pieces:
    """The sums of all elements up to each one along the dim, with it."""
    total = whole(value.shape, const(0))
    for part in value.parts:
        if part.number == const(0):
            continue
        own = _sum_of(value, part, dim)

        def added(a: Number, b: Number) -> Cases:
            assert isinstance(a, Poly) and isinstance(b, Poly), "the a and b are polynomials"
            return [((), a + b)]

        total = mapped(value.shape, [total, own], added)
    return total


def _sum_of(value: Pieces, part: Part, dim: int) -> Pieces:
    """The running sum of one part: its number, times how many of its elements there are."""
    if not isinstance(part.number, Poly) or Index(dim) in part.number.atoms:
        raise TooComplicated("a sum of different numbers")
    own, lower, upper = _interval(part.where, dim)
    here = index(dim)
    parts: list[Part] = []
    held: Constraints = frozenset()
    for constraint in sorted(own, key=str):
        parts.append(Part(held | {negated(constraint)}, const(0)))
        held = held | {constraint}
    firsts = [(frozenset[Poly](), const(0))]
    if lower is not None:
        firsts = [(frozenset((-lower,)), const(0)), (frozenset((lower.plus(-1),)), lower)]
    lasts = [(frozenset[Poly](), here)]
    if upper is not None:
        lasts = [(frozenset((here - upper,)), upper), (frozenset(((upper - here).plus(-1),)), here)]
    for first_where, first in firsts:
        for last_where, last in lasts:
            where = held | first_where | last_where
            count = (last - first).plus(1)
            parts.append(Part(where | {count}, part.number * count))
            parts.append(Part(where | {negated(count)}, const(0)))
    return of_parts(value.shape, parts)


def _interval(where: Constraints, dim: int) -> tuple[list[Poly], Poly | None, Poly | None]:
    """Constraints as those without the index along the dim, and its first and last value."""
    own: list[Poly] = []
    lower: Poly | None = None
    upper: Poly | None = None
    for constraint in where:
        coefficient = constraint.coefficients.get((Index(dim),), 0)
        rest = constraint - index(dim).times(coefficient)
        if Index(dim) in rest.atoms or abs(coefficient) > 1:
            raise TooComplicated("a sum over elements that are no interval")
        if coefficient == 0:
            own.append(constraint)
        elif coefficient == 1 and lower is None:
            lower = -rest
        elif coefficient == -1 and upper is None:
            upper = rest
        else:
            raise TooComplicated("a sum over elements with several bounds")
    return own, lower, upper


def _cumsum(call: Call) -> Pieces:
    value = call.value("self")
    if not value.shape:
        return value
    return running_sum(value, call.dim("dim", len(value.shape)))


def _summed(call: Call, value: Pieces) -> Pieces:
    """The sum over the dims of the call, in its shape."""
    given = call.argument("dim")
    rank = len(value.shape)
    if given is None or given == []:
        dims = list(range(rank))
    else:
        dims = [d % max(1, rank) for d in ([given] if isinstance(given, int) else given)]
    for dim in dims if rank else []:
        sums = running_sum(value, dim)
        last = [index(d) for d in range(rank)]
        last[dim] = value.shape[dim].plus(-1)
        shape = tuple(const(1) if d == dim else size for d, size in enumerate(value.shape))
        value = read(sums, shape, last)
    if call.argument("keepdim") or not rank:
        return value
    left = iter(range(len(call.shape)))
    indices = [const(0) if d in dims else index(next(left)) for d in range(rank)]
    return read(value, call.shape, indices)


def _sum(call: Call) -> Pieces:
    if call.dtype.is_floating_point:
        raise TooComplicated("a sum of rounded numbers")
    return _summed(call, call.value("self"))


def _any(call: Call, all_of: bool) -> Pieces:
    value = is_true(call.value("self"))
    if not all_of:
        return is_true(_summed(call, value))
    return logical_not(is_true(_summed(call, logical_not(value))))


RULES: dict[str, Rule] = {
    "aten::cumsum": _cumsum,
    "aten::sum": _sum,
    "aten::any": partial(_any, all_of=False),
    "aten::all": partial(_any, all_of=True),
}
