"""Ops that compute each element from the same elements of their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.positions.calls import Call, Rule
from mstpass.graph.positions.exact import checked
from mstpass.graph.positions.inequalities import negated
from mstpass.graph.positions.pieces import (
    Cases,
    Number,
    Pieces,
    chosen,
    mapped,
    split_by,
    whole,
)
from mstpass.graph.positions.polynomials import Poly, TooComplicated, const, floor_of, index

_TRUE, _FALSE = const(1), const(0)


def _float(number: Number) -> float:
    """A number that is the same everywhere."""
    if not isinstance(number, Poly):
        return number
    if number.constant is None:
        raise TooComplicated("positions beside numbers that are no integers")
    return float(number.constant)


def _number(value: float) -> Number:
    is_exact = abs(value) <= 2.0**53 and value.is_integer()
    return const(int(value)) if is_exact else value


# ---- arithmetic ----------------------------------------------------------------------------------
def _both(
    call: Call,
    names: Sequence[str],
    of_polys: Callable[..., Cases],
    of_floats: Callable[..., float],
) -> Pieces:
    if call.dtype is torch.bool:
        raise TooComplicated("arithmetic of booleans")

    def of(*numbers: Number) -> Cases:
        if all(isinstance(number, Poly) for number in numbers):
            return of_polys(*numbers)
        return [((), _number(of_floats(*map(_float, numbers))))]

    operands = [checked(call.value(name), call.dtype) for name in names]
    return mapped(call.shape, operands, of)


def _alpha(call: Call) -> int:
    alpha = call.argument("alpha")
    if alpha is None:
        return 1
    if not isinstance(alpha, int):
        raise TooComplicated("a factor that is no integer")
    return alpha


def _add(call: Call, sign: int) -> Pieces:
    if call.dtype is torch.bool and sign == 1 and _alpha(call) == 1:
        return _logic(call, "or", of_bits=False)
    factor = sign * _alpha(call)
    names = ("self", "other")
    return _both(call, names, lambda a, b: [((), a + b.times(factor))], lambda a, b: a + factor * b)


def _rsub(call: Call) -> Pieces:
    factor = _alpha(call)
    names = ("self", "other")
    return _both(call, names, lambda a, b: [((), b - a.times(factor))], lambda a, b: b - factor * a)


def _multiply(call: Call) -> Pieces:
    if call.dtype is torch.bool:
        return _logic(call, "and", of_bits=False)
    names = ("self", "other")
    return _both(call, names, lambda a, b: [((), a * b)], lambda a, b: a * b)


def _negate(call: Call) -> Pieces:
    return _both(call, ("self",), lambda a: [((), -a)], lambda a: -a)


def _absolute(call: Call) -> Pieces:
    return _both(call, ("self",), lambda a: [((a,), a), ((negated(a),), -a)], abs)


def _extreme(call: Call, names: tuple[str, str], largest: bool) -> Pieces:
    def of_polys(a: Poly, b: Poly) -> Cases:
        high, low = (a, b) if largest else (b, a)
        return [((high - low,), a), ((negated(high - low),), b)]

    return _both(call, names, of_polys, max if largest else min)


def _clamp(call: Call) -> Pieces:
    value = checked(call.value("self"), call.dtype)
    for name, largest in (("min", True), ("max", False)):
        if call.argument(name) is not None:
            bound = call.value(name)

            def of(a: Number, b: Number, largest: bool = largest) -> Cases:
                if not isinstance(a, Poly) or not isinstance(b, Poly):
                    raise TooComplicated("a clamp of numbers that are no integers")
                over = a - b if largest else b - a
                return [((over,), a), ((negated(over),), b)]

            value = mapped(call.shape, [value, bound], of)
    return value


def _divisor(call: Call) -> int:
    """The divisor of an integer division: a positive constant."""
    number = call.value("other").only
    divisor = number.constant if isinstance(number, Poly) else None
    if divisor is None or divisor <= 0 or call.dtype.is_floating_point:
        raise TooComplicated("a division by no positive integer")
    return divisor


def _floor_divide(call: Call) -> Pieces:
    if call.argument("rounding_mode") not in (None, "floor"):
        raise TooComplicated("a division that rounds towards zero")
    divisor = _divisor(call)
    return _both(call, ("self",), lambda a: [((), floor_of(a, divisor))], lambda a: a // divisor)


def _divide(call: Call) -> Pieces:
    if call.argument("rounding_mode") is None:
        raise TooComplicated("a division that is not rounded")
    return _floor_divide(call)


def _remainder(call: Call) -> Pieces:
    divisor = _divisor(call)
    return _both(
        call,
        ("self",),
        lambda a: [((), a - floor_of(a, divisor).times(divisor))],
        lambda a: a % divisor,
    )


# ---- comparisons ---------------------------------------------------------------------------------
def _compared_dtype(call: Call) -> torch.dtype:
    """The dtype to which the operands are converted before they are compared."""
    operands: list[torch.Tensor | float] = []
    for name in ("self", "other"):
        given = call.argument(name)
        value = value_of(given) if isinstance(given, fx.Node) else given
        operands.append(1 if value is None else value)  # a size
    first, second = operands
    return torch.result_type(first, second)


def _less_equal(a: Number, b: Number) -> Cases:
    if isinstance(a, Poly) and isinstance(b, Poly):
        return [((b - a,), _TRUE), ((negated(b - a),), _FALSE)]
    return [((), const(_float(a) <= _float(b)))]


def _equals(a: Number, b: Number) -> Cases:
    if isinstance(a, Poly) and isinstance(b, Poly):
        rest = b - a
        return [
            ((rest, -rest), _TRUE),
            ((rest.plus(-1),), _FALSE),
            (((-rest).plus(-1),), _FALSE),
        ]
    return [((), const(_float(a) == _float(b)))]


def _compare(call: Call, how: Callable[[Number, Number], Cases], opposite: bool) -> Pieces:
    dtype = _compared_dtype(call)
    operands = [checked(call.value(name), dtype) for name in ("self", "other")]
    found = mapped(call.shape, operands, how)
    return logical_not(found) if opposite else found


# ---- logic ---------------------------------------------------------------------------------------
def logical_not(value: Pieces) -> Pieces:
    return chosen(value, whole((), _FALSE), whole((), _TRUE), value.shape)


def is_true(value: Pieces) -> Pieces:
    """Whether each number is not 0."""

    def of(number: Number) -> Cases:
        if not isinstance(number, Poly):
            return [((), _TRUE)]
        if number in (_TRUE, _FALSE):
            return [((), number)]
        return [
            (where, const(1 - is_zero.constant))  # type: ignore[operator]
            for where, is_zero in _equals(number, _FALSE)
            if isinstance(is_zero, Poly)
        ]

    return mapped(value.shape, [value], of)


def _logic(call: Call, how: str, of_bits: bool) -> Pieces:
    """Logical ops; those of bits are the same for booleans."""
    if of_bits and call.dtype is not torch.bool:
        raise TooComplicated("an op of the bits of integers")
    if of_bits and {call.operand_dtype(n) for n in ("self", "other")} - {torch.bool, None}:
        raise TooComplicated("an op of the bits of integers")
    a = is_true(call.value("self"))
    if how == "not":
        return logical_not(a)
    b = is_true(call.value("other"))
    if how == "and":
        return chosen(a, b, whole((), _FALSE), call.shape)
    if how == "or":
        return chosen(a, whole((), _TRUE), b, call.shape)
    return chosen(a, logical_not(b), b, call.shape)


def _where(call: Call) -> Pieces:
    condition = is_true(call.value("condition"))
    sides = [checked(call.value(name), call.dtype) for name in ("self", "other")]
    return chosen(condition, sides[0], sides[1], call.shape)


def _masked_fill(call: Call) -> Pieces:
    fill = checked(call.value("value"), call.dtype)
    return chosen(is_true(call.value("mask")), fill, call.value("self"), call.shape)


def _convert(call: Call) -> Pieces:
    value = call.value("a" if call.argument("a") is not None else "self")
    return is_true(value) if call.dtype is torch.bool else value


def _same(call: Call) -> Pieces:
    return call.value("self")


def _triangle(call: Call, lower: bool) -> Pieces:
    """``tril`` and ``triu``, which put 0 on one side of a diagonal."""
    rank = len(call.shape)
    below = index(rank - 2) - index(rank - 1) + call.poly("diagonal", 0)
    inside = split_by(call.shape, [below if lower else -below], _TRUE, _FALSE)
    return chosen(inside, call.value("self"), whole((), _FALSE), call.shape)


RULES: dict[str, Rule] = {
    "aten::add": partial(_add, sign=1),
    "aten::sub": partial(_add, sign=-1),
    "aten::rsub": _rsub,
    "aten::mul": _multiply,
    "aten::neg": _negate,
    "aten::abs": _absolute,
    "aten::minimum": partial(_extreme, names=("self", "other"), largest=False),
    "aten::maximum": partial(_extreme, names=("self", "other"), largest=True),
    "aten::clamp": _clamp,
    "aten::clamp_min": _clamp,
    "aten::clamp_max": _clamp,
    "aten::floor_divide": _floor_divide,
    "aten::div": _divide,
    "aten::remainder": _remainder,
    "aten::le": partial(_compare, how=_less_equal, opposite=False),
    "aten::gt": partial(_compare, how=_less_equal, opposite=True),
    "aten::ge": partial(_compare, how=lambda a, b: _less_equal(b, a), opposite=False),
    "aten::lt": partial(_compare, how=lambda a, b: _less_equal(b, a), opposite=True),
    "aten::eq": partial(_compare, how=_equals, opposite=False),
    "aten::ne": partial(_compare, how=_equals, opposite=True),
    **{
        f"aten::{prefix}_{how}": partial(_logic, how=how, of_bits=prefix == "bitwise")
        for prefix in ("logical", "bitwise")
        for how in ("and", "or", "xor", "not")
    },
    "aten::where": _where,
    "aten::masked_fill": _masked_fill,
    "aten::tril": partial(_triangle, lower=True),
    "aten::triu": partial(_triangle, lower=False),
    "prims::convert_element_type": _convert,
    "aten::_to_copy": _convert,
    **{
        f"aten::{name}": _same
        for name in ("clone", "alias", "detach", "lift_fresh_copy", "contiguous")
    },
}
