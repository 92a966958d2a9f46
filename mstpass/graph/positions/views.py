"""Ops that move elements: each element of the result is one of an operand's."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph.positions.calls import Call, Rule
from mstpass.graph.positions.inequalities import implied, negated
from mstpass.graph.positions.pieces import (
    Part,
    Pieces,
    Shape,
    broadcast,
    of_parts,
    parts_at,
    read,
    split_by,
)
from mstpass.graph.positions.polynomials import Poly, TooComplicated, const, floor_of, index

_ONE = const(1)
_MASKS = (torch.bool, torch.uint8)


def _indices(shape: Shape) -> list[Poly]:
    """The index along each dim; 0 along dims of size 1."""
    return [const(0) if size == _ONE else index(d) for d, size in enumerate(shape)]


# ---- views ---------------------------------------------------------------------------------------
def _view(call: Call) -> Pieces:
    return reshaped(call.value("self"), call.shape)


def reshaped(value: Pieces, shape: Shape) -> Pieces:
    """The value's elements in row-major order, in another shape."""
    before = [d for d, size in enumerate(value.shape) if size != _ONE]
    after = [d for d, size in enumerate(shape) if size != _ONE]
    found = _indices(value.shape)
    while before or after:
        ins, outs = _next_group(value.shape, before, shape, after)
        before, after = before[len(ins) :], after[len(outs) :]
        if len(ins) == len(outs) == 1:
            found[ins[0]] = index(outs[0])
            continue
        linear = const(0)
        for dim in outs:
            linear = linear * shape[dim] + index(dim)
        _spread(value, ins, linear, found)
    return read(value, shape, found)


def _next_group(
    before: Shape, ins: list[int], after: Shape, outs: list[int]
) -> tuple[list[int], list[int]]:
    """The fewest first dims on both sides that hold equally many elements."""
    for total in range(2, len(ins) + len(outs) + 1):
        for count in range(max(1, total - len(outs)), min(len(ins), total - 1) + 1):
            left, right = ins[:count], outs[: total - count]
            if _product(before, left) == _product(after, right):
                return left, right
    raise TooComplicated("a view of sizes that cannot be compared")


def _product(shape: Shape, dims: list[int]) -> Poly:
    total = _ONE
    for dim in dims:
        total = total * shape[dim]
    return total


def _spread(value: Pieces, dims: list[int], linear: Poly, found: list[Poly]) -> None:
    """Set the indices along some dims that are the position ``linear`` in all of them."""
    if len(dims) == 1:
        found[dims[0]] = linear
        return
    for place, dim in enumerate(dims):
        if not value.depends_on(dim):
            continue
        stride = _product(value.shape, dims[place + 1 :]).constant
        size = value.shape[dim].constant
        if stride is None or (place and size is None):
            raise TooComplicated("a view that divides by a symbolic size")
        position = floor_of(linear, stride) if stride != 1 else linear
        if place and size is not None:
            position = position - floor_of(position, size).times(size)
        found[dim] = position


def _expand(call: Call) -> Pieces:
    return broadcast(call.value("self"), call.shape)


def _permute(call: Call) -> Pieces:
    value = call.value("self")
    order = [int(d) % len(value.shape) for d in call.argument("dims")]
    return _permuted(value, call.shape, order)


def _permuted(value: Pieces, shape: Shape, order: list[int]) -> Pieces:
    indices = _indices(value.shape)
    for new, old in enumerate(order):
        indices[old] = index(new)
    return read(value, shape, indices)


def _transpose(call: Call) -> Pieces:
    value = call.value("self")
    rank = len(value.shape)
    order = list(range(rank))
    if rank > 1:
        named = call.argument("dim0") is not None
        a, b = (call.dim("dim0", rank), call.dim("dim1", rank)) if named else (0, 1)
        order[a], order[b] = order[b], order[a]
    return _permuted(value, call.shape, order)


def _start(call: Call, name: str, size: Poly) -> Poly:
    """A position that may count from the end, which is written as one that counts from 0."""
    start = call.poly(name, 0)
    if implied(frozenset(), start):
        return start
    fits = implied(frozenset(), size + start) or start == const(-1)  # -1 of none reads nothing
    if implied(frozenset(), negated(start)) and fits:
        return size + start
    if start.constant is not None and size.constant is not None:
        return const(max(0, start.constant + size.constant))
    raise TooComplicated("a position that may count from either end")


def _slice(call: Call) -> Pieces:
    value = call.value("self")
    dim = call.dim("dim", len(value.shape))
    step = call.poly("step", 1)
    indices = _indices(value.shape)
    if call.shape[dim] != value.shape[dim] or step != _ONE:
        indices[dim] = _start(call, "start", value.shape[dim]) + index(dim) * step
    return read(value, call.shape, indices)


def _select(call: Call) -> Pieces:
    value = call.value("self")
    dim = call.dim("dim", len(value.shape))
    position = _start(call, "index", value.shape[dim])
    indices = [index(d - (d > dim)) for d in range(len(value.shape))]
    indices[dim] = position
    return read(value, call.shape, indices)


def _flip(call: Call) -> Pieces:
    value = call.value("self")
    indices = _indices(value.shape)
    for dim in call.argument("dims"):
        dim %= len(value.shape)
        indices[dim] = value.shape[dim].plus(-1) - indices[dim]
    return read(value, call.shape, indices)


# ---- several operands ----------------------------------------------------------------------------
def _cat(call: Call) -> Pieces:
    given: list[fx.Node] = call.argument("tensors")
    rank = len(call.shape)
    dim = call.dim("dim", rank)
    start, parts = const(0), []
    for operand in map(call.of, given):
        if len(operand.shape) != rank:
            raise TooComplicated("an empty operand of cat")
        end = start + operand.shape[dim]
        indices = _indices(operand.shape)
        indices[dim] = index(dim) - start
        inside = frozenset((index(dim) - start, negated(index(dim) - end)))
        parts += parts_at(operand, indices, inside)
        start = end
    return of_parts(call.shape, parts)


def _inside(
    call: Call, inside: list[Poly], value: Pieces, indices: list[Poly], other: Pieces
) -> Pieces:
    """``value`` at ``indices`` where the constraints hold, ``other`` elsewhere."""
    parts = []
    for part in split_by(call.shape, inside, _ONE, const(0)).parts:
        if part.number == _ONE:
            parts += parts_at(value, indices, part.where)
        else:
            parts += [
                Part(part.where | piece.where, piece.number)
                for piece in broadcast(other, call.shape).parts
            ]
    return of_parts(call.shape, parts)


def _pad(call: Call) -> Pieces:
    value = call.value("self")
    widths = call.argument("pad")
    indices = _indices(value.shape)
    inside: list[Poly] = []
    for pair in range(len(widths) // 2):
        dim = len(value.shape) - 1 - pair
        before = call.of(widths[2 * pair]).only
        if not isinstance(before, Poly):
            raise TooComplicated("a pad that is no integer")
        indices[dim] = index(dim) - before
        inside += [indices[dim], negated(indices[dim] - value.shape[dim])]
    return _inside(call, inside, value, indices, call.value("value"))


def _slice_scatter(call: Call) -> Pieces:
    base, source = call.value("self"), call.value("src")
    dim = call.dim("dim", len(base.shape))
    if call.poly("step", 1) != _ONE:
        raise TooComplicated("a slice with steps")
    indices = _indices(source.shape)
    indices[dim] = index(dim) - _start(call, "start", base.shape[dim])
    inside = [indices[dim], negated(indices[dim] - source.shape[dim])]
    return _inside(call, inside, source, indices, base)


def _select_scatter(call: Call) -> Pieces:
    base, source = call.value("self"), call.value("src")
    dim = call.dim("dim", len(base.shape))
    offset = index(dim) - _start(call, "index", base.shape[dim])
    indices = [index(d + (d >= dim)) for d in range(len(source.shape))]
    return _inside(call, [offset, -offset], source, indices, base)


# ---- reads at positions --------------------------------------------------------------------------
def _read_at(value: Pieces, shape: Shape, positions: dict[int, Pieces], rest: list[Poly]) -> Pieces:
    """The value at positions that are tensors themselves, of the result's shape."""
    rows: list[tuple[frozenset[Poly], dict[int, Poly]]] = [(frozenset(), {})]
    for dim, where_to in positions.items():
        size = value.shape[dim]
        new = []
        for held, chosen_indices in rows:
            for part in where_to.parts:
                where = held | part.where
                new.append((where, {**chosen_indices, dim: _from_start(part, size, where_to)}))
        rows = new
    parts = []
    for where, at in rows:
        parts += parts_at(value, [at.get(d, rest[d]) for d in range(len(value.shape))], where)
    return of_parts(shape, parts)


def _from_start(part: Part, size: Poly, positions: Pieces) -> Poly:
    """A position within a dim: one that counts from the end gets the size added."""
    number, room = part.number, positions.domain | part.where
    if not isinstance(number, Poly):
        raise TooComplicated("a position that is no integer")
    if implied(room, number) and implied(room, size.plus(-1) - number):
        return number
    if implied(room, negated(number)) and implied(room, size + number):
        return size + number
    raise TooComplicated("a position that may be outside of its dim")


def _index(call: Call) -> Pieces:
    value = call.value("self")
    given: list[Any] = call.argument("indices")
    tensors = {d: call.of(one) for d, one in enumerate(given) if one is not None}
    for one in given:
        if isinstance(one, fx.Node) and one.meta["val"].dtype in _MASKS:
            raise TooComplicated("an index by a mask")
    rank = max(len(t.shape) for t in tensors.values())
    dims = sorted(tensors)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if adjacent else 0
    common = call.shape[first : first + rank]
    # dims of the result: those before the indexed ones, the indices' own, those that are left
    free = [d for d in range(len(value.shape)) if d not in tensors]
    rest = [const(0)] * len(value.shape)
    for place, dim in enumerate(free):
        rest[dim] = index(place if place < first else place + rank)
    positions = {}
    for dim, tensor in tensors.items():
        moved = broadcast(tensor, common)
        indices = [index(first + d) for d in range(rank)]
        positions[dim] = read(moved, call.shape, indices)
    return _read_at(value, call.shape, positions, rest)


def _gather(call: Call) -> Pieces:
    value = call.value("self")
    dim = call.dim("dim", len(value.shape))
    positions = {dim: call.value("index")}
    return _read_at(value, call.shape, positions, _indices(call.shape))


def _index_select(call: Call) -> Pieces:
    value = call.value("self")
    dim = call.dim("dim", len(value.shape))
    positions = read(call.value("index"), call.shape, [index(dim)])
    return _read_at(value, call.shape, {dim: positions}, _indices(call.shape))


def _repeat(call: Call) -> Pieces:
    value = call.value("self")
    indices = []
    for d, size in enumerate(value.shape):
        own = index(d + len(call.shape) - len(value.shape))
        if size.constant is None:
            raise TooComplicated("copies of a symbolic size")
        indices.append(own - floor_of(own, size.constant).times(size.constant))
    return read(value, call.shape, indices)


RULES: dict[str, Rule] = {
    **{f"aten::{name}": _view for name in ("view", "reshape", "_unsafe_view", "unsqueeze")},
    "aten::squeeze": _view,
    "aten::expand": _expand,
    "aten::permute": _permute,
    "aten::transpose": _transpose,
    "aten::t": _transpose,
    "aten::slice": _slice,
    "aten::select": _select,
    "aten::flip": _flip,
    "aten::cat": _cat,
    "aten::constant_pad_nd": _pad,
    "aten::slice_scatter": _slice_scatter,
    "aten::select_scatter": _select_scatter,
    "aten::index": _index,
    "aten::_unsafe_index": _index,
    "aten::gather": _gather,
    "aten::index_select": _index_select,
    "aten::repeat": _repeat,
}
