"""Which tokens a slice selects, and which wide values of a graph are sliced over tokens."""

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
from mstpass.graph.tokens import SUM, Spec
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

aten = torch.ops.aten


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
class SlicedMatmul:
    """A matmul that widens, of whose result only the tokens of one window are used.

    Attributes:
        spec: the token dims of the matmul's result.
        slices: the slices of the result or of wide values computed from it.
    """

    matmul: fx.Node
    spec: Spec
    window: Window
    slices: list[fx.Node]


def first_sliced_matmul(joint: JointGraph, excluded: Container[str]) -> SlicedMatmul | None:
    """The largest such matmul whose name is not excluded; None if there is none."""
    for anchor, spec in joint.cached(anchors):
        if anchor.name in excluded:
            continue
        slices = slices_over_tokens(joint, anchor, spec)
        windows = {window_of(node, source_spec) for node, source_spec in slices}
        if len(windows) == 1 and None not in windows:
            (window,) = windows
            assert window is not None
            return SlicedMatmul(anchor, spec, window, [node for node, _ in slices])
    return None


def slices_over_tokens(
    joint: JointGraph, anchor: fx.Node, spec: Spec
) -> list[tuple[fx.Node, Spec]]:
    """The forward slices over tokens of the anchor's wide values, with the sources' specs."""
    specs: dict[fx.Node, Spec] = {anchor: spec}
    found = []
    for node in readers(joint, anchor, specs):
        for operand in node.all_input_nodes:
            if operand not in specs or node in joint.backward:
                continue
            if node.target is aten.slice.Tensor and sliced_dim(node) in specs[operand]:
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


# ---- one slice or slice_scatter ------------------------------------------------------------------
def window_of(node: fx.Node, spec: Spec) -> Window | None:
    """The window of a ``slice`` or ``slice_scatter``.

    Args:
        spec: the token dims of the value that is sliced, or that is written into.

    Returns:
        None if the node slices no token dim, selects nothing, or its step is not 1.
    """
    value = node.meta["val"] if _is_scatter(node) else value_of(node.all_input_nodes[0])
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
        node: a ``slice`` or ``slice_scatter`` along the dim at ``axis`` of the grid.
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
    """The dim along which a ``slice`` or ``slice_scatter`` works, counted from the left."""
    position = 2 if _is_scatter(node) else 1
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    value = node.meta["val"]
    assert isinstance(dim, int)
    return int(dim % value.dim())


def slice_bounds(node: fx.Node) -> list[Any]:
    """The arguments start, stop and step of a ``slice`` or ``slice_scatter``."""
    given = node.args[3 if _is_scatter(node) else 2 :]
    names = ("start", "end", "step")
    return [given[i] if len(given) > i else node.kwargs.get(n) for i, n in enumerate(names)]


def _is_scatter(node: fx.Node) -> bool:
    return node.target is aten.slice_scatter.default


def _number(argument: Any) -> int | None:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    return None if value is None else generic(value)
