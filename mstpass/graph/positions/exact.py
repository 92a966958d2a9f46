"""Which numbers a dtype holds exactly: others wrap around or are rounded, so no value has them."""

from __future__ import annotations

import math

import torch

from mstpass.graph.positions.pieces import Number, Pieces, Shape
from mstpass.graph.positions.polynomials import Atom, Floor, Index, Poly, TooComplicated

LARGEST_SIZE = 2**31  # what a symbolic size is taken to be at most
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def checked(value: Pieces, dtype: torch.dtype) -> Pieces:
    """The value, of which every number is one of the dtype's.

    Raises:
        TooComplicated: one may not be.
    """
    for part in value.parts:
        if not fits(part.number, value.shape, dtype):
            raise TooComplicated(f"{part.number} may be no {str(dtype).removeprefix('torch.')}")
    return value


def fits(number: Number, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether the dtype holds the number exactly, at each position of a tensor of this shape."""
    if not isinstance(number, Poly):
        return dtype in _DIGITS and _is_representable(number, dtype)
    low, high = bounds(number, shape)
    if dtype is torch.bool:
        return low >= 0 and high <= 1
    if dtype in _INTEGERS:
        limits = torch.iinfo(dtype)
        return limits.min <= low and high <= limits.max
    most = 2 ** _DIGITS[dtype] if dtype in _DIGITS else -1
    if number.constant is not None and dtype in _DIGITS:
        return _is_representable(float(number.constant), dtype)
    return -most <= low and high <= most


def _is_representable(number: float, dtype: torch.dtype) -> bool:
    if math.isnan(number):
        return False
    limits = torch.finfo(dtype)
    if number == 0 or math.isinf(number):
        return True
    mantissa, _ = math.frexp(number)
    is_short = (mantissa * 2 ** _DIGITS[dtype]).is_integer()
    return is_short and limits.tiny <= abs(number) <= limits.max


def bounds(poly: Poly, shape: Shape) -> tuple[int, int]:
    """A lower and an upper bound of the polynomial at all positions of a tensor of this shape."""
    low = high = 0
    for monomial, coefficient in poly.terms:
        least, most = 1, 1
        for one in monomial:
            ends = _bounds(one, shape)
            products = [a * b for a in (least, most) for b in ends]
            least, most = min(products), max(products)
        low += min(coefficient * least, coefficient * most)
        high += max(coefficient * least, coefficient * most)
    return low, high


def _bounds(one: Atom, shape: Shape) -> tuple[int, int]:
    if isinstance(one, Floor):
        low, high = bounds(one.numerator, shape)
        return low // one.divisor, high // one.divisor
    if isinstance(one, Index):
        size = shape[one.dim].constant
        return 0, LARGEST_SIZE if size is None else max(0, size - 1)
    return 0, LARGEST_SIZE
