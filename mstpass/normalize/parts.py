"""A value that consists of parts along one dim, and the ops that show or write single parts.

sizes (2, 3) along dim 0:                rows 0 and 1 are the first part, 2, 3 and 4 the second
sizes (2, 2) along dim 0, interleaved:   rows 0 and 2 are the first part, 1 and 3 the second
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from mstpass.graph.linearity import is_zero
from mstpass.graph.sizes import Size, generic, generic_shape
from mstpass.graph.token_rules.arguments import dims_of, shape_of
from mstpass.graph.tokens import group_of
from mstpass.normalize.token_window import SCATTERS, TAKERS, rows_taken, scattered_source

aten = torch.ops.aten
WRITERS = (aten.cat.default, *SCATTERS)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The dim along which a value consists of parts, and their sizes there.

    Attributes:
        interleaved: the parts take turns, row by row; they have the same size.
    """

    dim: int
    sizes: tuple[Size, ...]
    interleaved: bool = False

    def bounds(self, number: int) -> tuple[Size, Size, int]:
        """Where a part begins and ends, and the step from one of its rows to the next."""
        if self.interleaved:
            whole: Any = sum(self.sizes)
            return number, whole, len(self.sizes)
        start: Any = sum(self.sizes[:number])
        return start, start + self.sizes[number], 1

    def number_of(self, rows: range) -> int | None:
        """The part with these rows at the generic point (graph/sizes.py)."""
        for number in range(len(self.sizes)):
            if rows.start < rows.stop and rows == range(*map(generic, self.bounds(number))):
                return number
        return None

    def fits(self, other: Parts) -> bool:
        """Whether both have parts of the same sizes, in the same order."""
        same_sizes = list(map(generic, self.sizes)) == list(map(generic, other.sizes))
        return same_sizes and self.interleaved == other.interleaved


def parts_after_view(
    source: torch.Tensor | None, result: torch.Tensor | None, parts: Parts
) -> Parts | None:
    """The parts of a view; None if it does not keep them together.

    ``[k n, V] -> [k, n, V]`` turns parts of n rows into parts of size 1, and back. ``[n, k, V] ->
    [n k, V]`` and ``[n, k V] -> [n k, V]`` make parts that lie in a row interleaved, and back.
    """
    assert source is not None and result is not None, "the source and result are known"
    shape, new = generic_shape(source), generic_shape(result)
    ins, outs = group_of(shape, new, parts.dim)
    if not outs:
        return None
    if parts.interleaved:
        return _apart(source, result, ins, outs, parts)
    if ins[0] != parts.dim:
        return _interleaved(source, result, ins, outs, parts)
    inner = math.prod(shape[d] for d in ins[1:])
    inner_of_result = math.prod(new[d] for d in outs[1:])
    times: Any = math.prod(source.shape[d] for d in ins[1:])
    by: Any = math.prod(result.shape[d] for d in outs[1:])
    sizes: list[Size] = []
    for size in parts.sizes:
        elements = generic(size) * inner
        if elements % inner_of_result:
            return None
        whole: Any = size * times
        sizes.append(whole if inner_of_result == 1 else _quotient(whole, by))
    return Parts(outs[0], tuple(sizes))


def _interleaved(
    source: torch.Tensor, result: torch.Tensor, ins: list[int], outs: list[int], parts: Parts
) -> Parts | None:
    """The parts of an inner dim, once a view moves their number to the dims outside of it."""
    if ins[-1] != parts.dim or len(outs) > 2:
        return None
    width = generic(result.shape[outs[-1]]) if len(outs) == 2 else 1
    if set(map(generic, parts.sizes)) != {width}:
        return None
    rows: Any = math.prod(source.shape[d] for d in ins[:-1])
    return Parts(outs[0], (rows,) * len(parts.sizes), interleaved=True)


def _apart(
    source: torch.Tensor, result: torch.Tensor, ins: list[int], outs: list[int], parts: Parts
) -> Parts | None:
    """Interleaved parts after a view: they stay so, or are in an inner dim, one after the other."""
    if ins[0] != parts.dim or len(ins) > 2:
        return None
    if len(ins) == len(outs) == 1:
        return dataclasses.replace(parts, dim=outs[0])
    width: Any = source.shape[ins[1]] if len(ins) == 2 else 1
    count = len(parts.sizes)
    if generic(result.shape[outs[-1]]) != count * generic(width):
        return None
    return Parts(outs[-1], (width,) * count)


def _quotient(size: Size, by: Size) -> Size:
    return 1 if generic(size) == generic(by) else size // by


def picked(node: fx.Node, parts: Parts) -> int | None:
    """The number of the part that a ``select`` or ``slice`` takes; None if it takes none."""
    return _part_at(node, parts) if node.target in TAKERS else None


def written_parts(node: fx.Node, parts: Parts) -> dict[int, fx.Node] | None:
    """The parts that an op writes side by side, or into zeros; None if it writes no parts."""
    if node.target not in WRITERS or sum(map(generic, parts.sizes)) != _size(node, parts.dim):
        return None
    if node.target is aten.cat.default:
        (dim,) = dims_of(node, len(shape_of(node)), "dim")
        pieces: Any = node.args[0]
        sizes = tuple(shape_of(piece)[dim] for piece in pieces) if dim == parts.dim else ()
        return dict(enumerate(pieces)) if Parts(dim, sizes).fits(parts) else None
    number = _part_at(node, parts) if is_zero(node.args[0]) else None
    return None if number is None else {number: scattered_source(node)}


def _size(node: fx.Node, dim: int) -> int | None:
    shape = shape_of(node)
    return shape[dim] if dim < len(shape) else None


def _part_at(node: fx.Node, parts: Parts) -> int | None:
    """The number of the part that an op takes or writes."""
    dim, rows = rows_taken(node) or (None, range(0))
    return parts.number_of(rows) if dim == parts.dim else None
