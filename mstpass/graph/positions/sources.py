"""Ops that make a tensor of nothing but sizes and numbers."""

from __future__ import annotations

from functools import partial

from mstpass.graph.positions.calls import Call, Rule
from mstpass.graph.positions.pieces import Number, Pieces, whole
from mstpass.graph.positions.polynomials import Poly, TooComplicated, const, index


def _iota(call: Call) -> Pieces:
    return _count(call, call.poly("start"), call.poly("step"))


def _arange(call: Call) -> Pieces:
    if call.dtype.is_floating_point:
        raise TooComplicated("positions that are no integers")
    return _count(call, call.poly("start", 0), call.poly("step", 1))


def _count(call: Call, start: Poly, step: Poly) -> Pieces:
    return whole(call.shape, start + index(0) * step)


def _full(call: Call) -> Pieces:
    number: Number = call.value("fill_value").only
    return whole(call.shape, number)


def _constant(call: Call, number: int) -> Pieces:
    return whole(call.shape, const(number))


def _scalar(call: Call) -> Pieces:
    return whole(call.shape, call.value("s").only)


RULES: dict[str, Rule] = {
    "prims::iota": _iota,
    "aten::arange": _arange,
    "aten::scalar_tensor": _scalar,
    **{f"aten::{name}": _full for name in ("full", "full_like", "new_full")},
    **{
        f"aten::{name}": partial(_constant, number=number)
        for kind, number in (("zeros", 0), ("ones", 1))
        for name in (kind, f"{kind}_like", f"new_{kind}")
    },
}
