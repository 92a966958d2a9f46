"""Values that a graph computes from nothing but positions: computed, but never whole.

A model computes its attention mask from ``arange``, sizes and constants. So it can be computed on
the CPU while the step is planned. Small values are, by their own ops. A large value of queries x
keys is known by *tiles* of some rows and columns: the least and the largest element of each. They
follow from those of its operands, for ops that are monotonic in each operand:

    queries 256..511, keys 0..255       keys <= queries: 1..1, all are true
    queries 256..511, keys 256..511     keys <= queries: 0..1, smaller tiles tell

A tile of one element tells all. So what tiles say is no estimate.

Where sizes are symbolic, a value is computed at the largest that the plan serves. It says what
those of smaller batches are if each op of its computation gives the first elements of its result
for the first elements of its operands.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.sizes import expression, hint, hint_shape, is_bounded, is_size, is_static
from mstpass.graph.token_rules.arguments import argument
from mstpass.torch_internals.graphs import name_of, schema_of
from mstpass.walk import walk_once

Bounds = tuple[Tensor, Tensor]  # the least and the largest element of each tile
_SMALL = 2**20  # elements of a value that is computed whole
_PARTS = 16  # of a tile, along the rows and along the columns
_AT_ONCE = 2**12  # tiles that are divided
_LARGEST_INTEGER = 2**31  # sums and products of two smaller ones do not wrap around

# Ops by their names. Besides those that compute element by element, all that are known are here.
_SOURCES = {"iota", "arange", "full", "zeros", "ones", "scalar_tensor"}
_SAME = {"expand", "clone", "alias", "lift_fresh_copy"}
_BY_SHAPE = {"view", "_unsafe_view", "unsqueeze", "squeeze"}
_CONVERSIONS = {"convert_element_type", "_to_copy"}
_FIRST_OF_FIRST = {*_SOURCES, *_SAME, *_BY_SHAPE, *_CONVERSIONS, "permute", "select", "slice"}
_FIRST_OF_FIRST |= {"cat", "index", "cumsum"}
_OTHERS = {"rev", "repeat", "constant_pad_nd", "slice_scatter", "select_scatter", "gather"}
_OTHERS |= {"sum", "any", "all"}
_ORDERED = {"le", "lt", "ge", "gt", "minimum", "maximum", "where", "masked_fill"}
_LOGICAL = {f"{a}_{b}" for a in ("logical", "bitwise") for b in ("and", "or", "xor", "not")}
_SUMS = {"add", "sub", "rsub", "neg", "mul"}
_SIZES = {"length", "size", "end"}  # arguments that say how much of the result there is


class NotComputed(Exception):
    """A value is not computed; the message says why, and is empty if the value depends on data."""


@dataclass(frozen=True)
class Tiles:
    """Squares of some rows and columns of a matrix; those at its edges may reach beyond it."""

    rows: Tensor  # of each tile its number, along the rows
    columns: Tensor
    edge: int

    @staticmethod
    def whole(shape: Sequence[int]) -> Tiles:
        """One tile that holds the matrix."""
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        edge = 1
        while edge < max(shape):
            edge *= _PARTS
        return Tiles(first, first, edge)

    def parts(self, which: Tensor, shape: Sequence[int]) -> Iterator[Tiles]:
        """The parts of some tiles, not too many at once, that are in the matrix."""
        each, edge = torch.arange(_PARTS, device="cpu"), self.edge // _PARTS
        for some in which.nonzero().flatten().split(_AT_ONCE):
            rows, columns = torch.broadcast_tensors(
                (self.rows[some] * _PARTS)[:, None, None] + each[:, None],
                (self.columns[some] * _PARTS)[:, None, None] + each,
            )
            inside = (rows * edge < shape[0]) & (columns * edge < shape[1])
            yield Tiles(rows[inside], columns[inside], edge)

    def offsets(self, shape: Sequence[int]) -> Bounds:
        """The least and the largest column less row of each tile in a matrix."""
        row, column = self.rows * self.edge, self.columns * self.edge
        last_row, last_column = (
            (first + (self.edge - 1)).clamp(max=size - 1)
            for first, size in zip((row, column), shape, strict=True)
        )
        return column - last_row, last_column - row


class Computed:
    """A value that follows from positions, as a matrix: what is said holds for all its first dims.

    Args:
        shape: the matrix's rows and columns; the value may have one, for all of them.

    Raises:
        NotComputed: the value depends on data, or it has an op of which nothing is known.
    """

    def __init__(self, joint: JointGraph, node: fx.Node, shape: tuple[int, int]):
        self._node, self._shape = node, shape
        self._nodes = joint.sorted(walk_once([node], _operands))
        _check_sources(self._nodes)
        self._small: dict[fx.Node, Tensor] = {}
        self._matrices: dict[tuple[fx.Node, int], Bounds] = {}
        for one in self._nodes:
            if _is_small(one):
                self._small[one] = self._whole(one)
        large = [one for one in self._nodes if one not in self._small]
        self._read = {node, *large, *(operand for one in large for operand in _operands(one))}
        if any(map(_has_symbols, self._nodes)):
            for one in self._nodes:
                self._check_first_of_first(one)

    def _whole(self, node: fx.Node) -> Tensor:
        """A small value, by its own op on the CPU."""
        value = _value(node)
        if not all(map(_is_small, _operands(node))):
            raise NotComputed(f"{node.name} is a part, or a sum, of a large value")
        try:
            result = _run(node, self._small)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NotComputed(f"{node.name} does not run: {error}") from error
        if (list(result.shape), result.dtype) != (hint_shape(value), value.dtype):
            raise NotComputed(f"{node.name} has another shape or dtype")
        return result

    def _check_first_of_first(self, node: fx.Node) -> None:
        """For the first elements of its operands, the op gives the first ones of its result."""
        name, shape = _name(node), _value(node).shape
        names = [one.name for one in schema_of(node.target).arguments]  # type: ignore[arg-type]
        given = {one: argument(node, one) for one in names}
        sized = {one for one, value in given.items() if _has_size(value)}
        fits = name in _FIRST_OF_FIRST or ops.is_pointwise(node)
        fits = fits and is_bounded(_value(node)) and sized <= _SIZES
        if name in _BY_SHAPE:
            before, after = _wide(_value(given["self"]).shape), _wide(shape)
            fits = fits and before == after
        elif name in ("select", "slice"):
            fits = fits and (given["index" if name == "select" else "start"] or 0) >= 0
        elif name == "cat":
            *first, _ = (_value(one).shape[given["dim"]] for one in given["tensors"])
            fits = fits and all(type(size) is int for size in first)
        elif name == "index":
            tensors = [self._small.get(one) for one in given["indices"] if one is not None]
            fits = fits and all(
                t is not None and t.dtype is torch.int64 and t.min() >= 0 for t in tensors
            )
        if not fits:
            raise NotComputed(f"{node.name} may be another one at other sizes")

    # ---- tiles -----------------------------------------------------------------------------------
    def bounds(self, tiles: Tiles) -> Bounds:
        """The least and the largest element of each tile."""
        known: dict[fx.Node, Bounds] = {}
        for node in self._nodes:
            if node in self._read:
                _check_matrix(node, self._shape)
                is_small = node in self._small
                found = self._of_small(node, tiles) if is_small else _of_large(node, known, tiles)
                if any(end.is_floating_point() and end.isnan().any() for end in found):
                    raise NotComputed(f"{node.name} has elements that are no number")
                known[node] = found
        low, high = (end.expand_as(tiles.rows) for end in known[self._node])
        return low, high

    def _of_small(self, node: fx.Node, tiles: Tiles) -> Bounds:
        if not _value(node).dim():
            return self._small[node], self._small[node]
        if (node, tiles.edge) not in self._matrices:
            self._matrices[node, tiles.edge] = self._matrix(node, tiles.edge)
        low, high = self._matrices[node, tiles.edge]
        row, column = (
            number * (size > 1)
            for number, size in zip((tiles.rows, tiles.columns), low.shape, strict=True)
        )
        first = low[row, column]
        return first, first if high is low else high[row, column]

    def _matrix(self, node: fx.Node, edge: int) -> Bounds:
        """The bounds of all tiles of a small value."""
        whole = self._small[node]
        whole = whole.reshape(-1, *([1] * (2 - whole.dim())), *whole.shape[-2:])
        low, high = whole.amin(0), whole.amax(0)
        for dim in (0, 1):
            low, high = _in_blocks(low, dim, edge).amin(dim), _in_blocks(high, dim, edge).amax(dim)
        return low, low if torch.equal(low, high) else high


def _operands(node: fx.Node) -> list[fx.Node]:
    return [one for one in node.all_input_nodes if not is_size(one)]


def _value(node: fx.Node) -> Tensor:
    value = value_of(node)
    if value is None:
        raise NotComputed(f"{node.name} has several results")
    return value


def _is_small(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and math.prod(hint_shape(value)) <= _SMALL


def _has_symbols(node: fx.Node) -> bool:
    return not is_static(_value(node)) or any(map(is_size, node.all_input_nodes))


def _has_size(given: Any) -> bool:
    each = given if isinstance(given, list | tuple) else [given]
    return any(isinstance(one, fx.Node) and is_size(one) for one in each)


def _wide(shape: Sequence[Any]) -> list[Any]:
    return [size for size in map(expression, shape) if size != 1]


def _name(node: fx.Node) -> str:
    """The name of one of PyTorch's own ops."""
    namespace, _, name = name_of(node.target).partition("::")
    return name if namespace in ("aten", "prims") else ""


def _check_sources(nodes: Sequence[fx.Node]) -> None:
    """Nothing is read but positions, sizes and constants, by ops that are known."""
    for node in nodes:
        if node.op != "call_function" or not (_operands(node) or _name(node) in _SOURCES):
            raise NotComputed
    for node in nodes:
        if _name(node) not in _FIRST_OF_FIRST | _OTHERS and not ops.is_pointwise(node):
            raise NotComputed(f"{node.name}: {node.target} has no rule")


def _run(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    """Run a node's op on the CPU."""
    given = lambda operand: hint(operand.meta["val"]) if is_size(operand) else values[operand]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result


def _check_matrix(node: fx.Node, shape: tuple[int, int]) -> None:
    own = [1, 1, *hint_shape(_value(node))][-2:]
    if any(size not in (1, whole) for size, whole in zip(own, shape, strict=True)):
        raise NotComputed(f"{node.name} has other rows and columns")


def _in_blocks(value: Tensor, dim: int, edge: int) -> Tensor:
    """The elements of each block along a dim, in the dim's place; what is left is in the next."""
    size = value.shape[dim]
    edge = min(edge, size)
    count = -(-size // edge)
    places = torch.arange(count * edge, device="cpu").clamp(max=size - 1)
    return value.index_select(dim, places).unflatten(dim, (count, edge)).movedim(dim + 1, dim)


# ---- ops of large values -------------------------------------------------------------------------
def _of_large(node: fx.Node, known: dict[fx.Node, Bounds], tiles: Tiles) -> Bounds:
    """The bounds of a value in tiles, which follow from those of its operands.

    Raises:
        NotComputed: they do not.
    """
    name, value, operands = _name(node), _value(node), _operands(node)
    if name in ("full", "zeros", "ones"):
        number = argument(node, "fill_value") if name == "full" else int(name == "ones")
        one = torch.full(tiles.rows.shape, number, dtype=value.dtype, device="cpu")
        return one, one
    reads: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), reads.append)
    if not operands or sum(one in operands for one in reads) > len(operands):
        raise NotComputed(f"{node.name}: {node.target} has no rule for large values")
    ends = [known[one] for one in operands]
    shapes = [hint_shape(_value(one))[-2:] for one in (operands[0], node)]
    if name in _SAME or (name in _BY_SHAPE and shapes[0] == shapes[1]):
        return ends[0]
    if name in ("eq", "ne"):
        return _equal(name, ends, argument(node, "other"))
    if name == "abs" and _adds_exactly(ends):
        low, high = ends[0]
        return torch.maximum(low, -high).clamp(min=0), torch.maximum(-low, high)
    if not _is_monotonic(node, name, ends):
        raise NotComputed(f"{node.name}: {node.target} has no rule for large values")
    each = itertools.product(*([low] if low is high else [low, high] for low, high in ends))
    found = [_run(node, dict(zip(operands, corner, strict=True))) for corner in each]
    low = functools.reduce(torch.minimum, found)
    return low, low if len(found) == 1 else functools.reduce(torch.maximum, found)


def _is_monotonic(node: fx.Node, name: str, ends: Sequence[Bounds]) -> bool:
    """Whether more of one operand always gives more, or always less, whatever the others are."""
    dtypes = [low.dtype for low, _ in ends]
    if name in _ORDERED:
        return True
    if name in _LOGICAL:
        return all(dtype is torch.bool for dtype in dtypes)
    if name in _CONVERSIONS:
        return _value(node).dtype.is_floating_point or dtypes == [torch.bool]
    numbers = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, int | float)]
    return name in _SUMS and _adds_exactly(ends) and all(map(_is_moderate, numbers))


def _is_moderate(number: float) -> bool:
    return (isinstance(number, float) and math.isfinite(number)) or abs(number) <= _LARGEST_INTEGER


def _adds_exactly(ends: Sequence[Bounds]) -> bool:
    """Whether sums and products are numbers and do not wrap around; rounding keeps their order."""
    each = [end for bounds in ends for end in bounds]
    if all(end.is_floating_point() for end in each):
        return all(bool(end.isfinite().all()) for end in each)
    return all(end.dtype is torch.int64 and end.abs().amax() <= _LARGEST_INTEGER for end in each)


def _equal(name: str, ends: Sequence[Bounds], other: Any) -> Bounds:
    """An element may be equal where the bounds overlap, and is where all of them are one."""
    (low, high), (least, most) = [*ends, (other, other)][:2]
    certain, possible = (low == most) & (high == least), (low <= most) & (high >= least)
    return (certain, possible) if name == "eq" else (~possible, ~certain)
