"""Which tokens a slice or an index selects, and from which wide values of a graph."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.sizes import generic, generic_shape
from mstpass.graph.token_rules.arguments import argument, shape_of
from mstpass.graph.tokens import SUM, Spec
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

aten = torch.ops.aten
_SLICES = (aten.slice.Tensor, aten.slice_scatter.default)


@dataclasses.dataclass(frozen=True)
class Window:
    """The tokens that a slice selects. Two windows are equal if they select the same tokens.

    Attributes:
        grid: the sizes of the token dims, such as (B, S), at the generic point (sizes.py).
        axis: the position in the grid of the dim that is sliced.
        start, stop: the bounds as in ``range``; the step is 1.
    """

    grid: tuple[int, ...]
    axis: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens whose numbers a vector holds, in its order; a token may be selected twice.

    Attributes:
        grid: the size of the one token dim, at the generic point.
        index: the name of the vector.
    """

    grid: tuple[int]
    index: str
    axis: int = 0


Choice = Window | Rows


@dataclasses.dataclass(frozen=True)
class SlicedMatmul:
    """A matmul that widens, of whose result only one choice of tokens is used.

    Attributes:
        spec: the token dims of the matmul's result.
        slices: the slices, or the selections, of the result or of wide values computed from it.
    """

    matmul: fx.Node
    spec: Spec
    window: Choice
    slices: list[fx.Node]


def first_sliced_matmul(joint: JointGraph, excluded: Container[str]) -> SlicedMatmul | None:
    """The largest such matmul whose name is not excluded; None if there is none."""
    for anchor, spec in joint.cached(anchors):
        if anchor.name in excluded:
            continue
        slices = _choices(joint, anchor, spec)
        windows = {choice_of(node, source_spec) for node, source_spec in slices}
        if len(windows) == 1 and None not in windows:
            (window,) = windows
            assert window is not None, "the window is known"
            return SlicedMatmul(anchor, spec, window, [node for node, _ in slices])
    return None


def slices_over_tokens(
    joint: JointGraph, anchor: fx.Node, spec: Spec
) -> list[tuple[fx.Node, Spec]]:
    """The forward slices over tokens of the anchor's wide values, with the sources' specs."""
    return [(n, s) for n, s in _choices(joint, anchor, spec) if n.target is aten.slice.Tensor]


def _choices(joint: JointGraph, anchor: fx.Node, spec: Spec) -> list[tuple[fx.Node, Spec]]:
    """The same of slices and of selections of rows."""
    specs: dict[fx.Node, Spec] = {anchor: spec}
    found = []
    for node in readers(joint, anchor, specs):
        for operand in node.all_input_nodes:
            if operand not in specs or node in joint.backward:
                continue
            if _is_choice(node, operand) and sliced_dim(node) in specs[operand]:
                found.append((node, specs[operand]))
                break
            result = ops.result_spec(node, operand, specs[operand]) if node.op != "output" else SUM
            if isinstance(result, tuple) and numel(node) >= WIDE_OF_ANCHOR * numel(anchor):
                specs[node] = result
    return found


def readers(joint: JointGraph, anchor: fx.Node, followed: Container[fx.Node]) -> Iterator[fx.Node]:
    """The users of the anchor and, for each user in ``followed``, its users, in the graph's order.

    The caller may add to ``followed`` while it iterates.
    """
    waiting = [joint.index[user] for user in anchor.users]
    heapq.heapify(waiting)
    last = None
    while waiting:
        i = heapq.heappop(waiting)
        if i == last:
            continue
        yield joint.nodes[i]
        if joint.nodes[i] in followed:
            for user in joint.nodes[i].users:
                heapq.heappush(waiting, joint.index[user])
        last = i


def _is_choice(node: fx.Node, source: fx.Node) -> bool:
    """Whether the node selects tokens of a value."""
    if node.target is aten.index.Tensor:
        return row_index(node) is not None and source is node.args[0]
    return node.target is aten.slice.Tensor


# ---- one slice or selection, or what writes it into zeros ----------------------------------------
def choice_of(node: fx.Node, spec: Spec) -> Choice | None:
    """The tokens that a slice or an index selects, or that its counterpart writes; None if it
    selects others.

    Args:
        spec: the token dims of the value that is selected from, or that is written into.
    """
    index = row_index(node)
    if index is None:
        return window_of(node, spec) if node.target in _SLICES else None
    shape = shape_of(node if is_scatter(node) else node.args[0])  # type: ignore[arg-type]
    return Rows((shape[0],), index.name) if spec == (0,) else None


def row_index(node: fx.Node) -> fx.Node | None:
    """The vector of row numbers with which a node reads rows, or writes each one's own values.

    None if the node does something else. Rows that are written are added up where a number stands
    in the vector twice.
    """
    if node.target not in (aten.index.Tensor, aten.index_put.default):
        return None
    indices: Any = argument(node, "indices")
    index = indices[0] if len(indices) == 1 else None
    if not isinstance(index, fx.Node):
        return None
    value = value_of(index)
    if value is None or value.dim() != 1 or value.dtype in (torch.bool, torch.uint8):
        return None
    if node.target is aten.index_put.default:
        written = value_of(node.args[2])  # type: ignore[arg-type]
        if written is None or not (argument(node, "accumulate") or are_distinct(index)):
            return None
        rows = [*generic_shape(value), *generic_shape(node.meta["val"])[1:]]
        if list(generic_shape(written)) != rows:
            return None
    return index


def are_distinct(rows: fx.Node) -> bool:
    """Whether no row number stands in the vector twice, as far as the graph tells."""
    return (
        rows.target is aten.squeeze.dim and rows.all_input_nodes[0].target is aten.nonzero.default
    )


def scattered_source(node: fx.Node) -> fx.Node:
    """What a ``slice_scatter`` or an ``index_put`` writes."""
    source = node.args[2 if node.target is aten.index_put.default else 1]
    assert isinstance(source, fx.Node), "the source is a node"
    return source


def is_scatter(node: fx.Node) -> bool:
    """Whether the node writes the values of a choice."""
    if node.target is aten.index_put.default:
        return row_index(node) is not None
    return node.target is aten.slice_scatter.default


def window_of(node: fx.Node, spec: Spec) -> Window | None:
    """The window of a ``slice`` or ``slice_scatter``.

    Args:
        spec: the token dims of the value that is sliced, or that is written into.

    Returns:
        None if the node slices no token dim, selects nothing, or its step is not 1.
    """
    value = node.meta["val"] if is_scatter(node) else value_of(node.all_input_nodes[0])
    if value is None:
        return None
    dim, shape = sliced_dim(node), generic_shape(value)
    start, stop, step = map(_number, slice_bounds(node))
    if step not in (None, 1) or dim not in spec:
        return None
    first, last, _ = slice(start, stop).indices(shape[dim])
    if last <= first:
        return None
    return Window(tuple(shape[d] for d in spec), spec.index(dim), first, last)


def grid_spec(node: fx.Node, shape: Sequence[int], grid: Sequence[int], axis: int) -> Spec | None:
    """The dims of a value that hold the token dims of a window; None if it has none.

    Dims of size 1 may stand between them.

    Args:
        node: makes or writes a choice along the dim at ``axis`` of the grid.
        shape: of the value that it slices, or that it writes into.
    """
    dim = sliced_dim(node)
    before = [d for d in range(dim) if shape[d] != 1]
    after = [d for d in range(dim + 1, len(shape)) if shape[d] != 1]
    if len(before) < axis:
        return None
    spec = (*before[len(before) - axis :], dim, *after[: len(grid) - axis - 1])
    return spec if [shape[d] for d in spec] == list(grid) else None


def sliced_dim(node: fx.Node) -> int:
    """The dim along which a choice is made or written, counted from the left."""
    position = 2 if is_scatter(node) else 1
    if row_index(node) is not None:
        return 0
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    value = node.meta["val"]
    assert isinstance(dim, int), "the dim is a number"
    return int(dim % value.dim())


def slice_bounds(node: fx.Node) -> list[Any]:
    """The arguments start, stop and step of a ``slice`` or ``slice_scatter``."""
    given = node.args[3 if is_scatter(node) else 2 :]
    names = ("start", "end", "step")
    return [given[i] if len(given) > i else node.kwargs.get(n) for i, n in enumerate(names)]


def _number(argument: Any) -> int | None:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    return None if value is None else generic(value)
