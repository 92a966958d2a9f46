"""The parts of a graph that work on single windows of the tokens of one wide value.

Terms:
    *item*: a slice or a selection of a wide value along one of its token dims.
    *lane*: an item, and the values that are made from it token by token (its *cone*), in the
        forward and in the backward.
    *demand*: a value of a lane that a node outside of the lane reads, and how it is read:
        ``window``  a narrow value, token by token
        ``sink``    the gradient of the item, by a node that writes it to its place among all tokens
        ``sum``     a wide value, by the gradient of a weight, which sums over the lane's tokens
    *alike*: lanes are alike if their values are made by the same ops in the same order, and are
        read alike. Narrow values from outside, such as the labels, may differ.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import JointGraph, numel, tensors_of, value_of
from mstpass.graph.sizes import Size, generic, is_size, is_static
from mstpass.graph.token_rules.arguments import argument, dims_of, shape_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec
from mstpass.normalize.partial import (
    SCATTERS,
    TAKERS,
    readings,
    rows_taken,
    scattered_source,
)
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Windows:
    """A wide value, its token dims, and the dim along which its items are taken.

    Attributes:
        spec: the token dims; ``grid``: their sizes.
        axis: the position in the grid of the dim that is sliced.
        wide_numel: how many elements of the whole value are wide.
        items: each with the bounds of its tokens along the axis.
        of_products: the source is narrow; products make wide values of its items
            (join_windows.py).
    """

    source: fx.Node
    spec: Spec
    axis: int
    wide_numel: float
    items: tuple[tuple[fx.Node, int, int], ...]
    of_products: bool = False

    @property
    def grid(self) -> list[int]:
        return [shape_of(self.source)[d] for d in self.spec]


@dataclasses.dataclass(frozen=True)
class Demand:
    """A value of a lane that is read outside: how, and by which node."""

    kind: str
    node: fx.Node
    reader: fx.Node


@dataclasses.dataclass
class Lane:
    """See the top of the file.

    Attributes:
        start, stop: the bounds of its tokens, at the generic point (graph/sizes.py).
        first, length: the same as the graph has it: where they begin, and how many there are.
    """

    item: fx.Node
    start: int
    stop: int
    first: Size
    length: Size
    wide_numel: float
    cone: dict[fx.Node, Spec]
    demands: list[Demand]

    @property
    def has_gradients(self) -> bool:
        """Whether the backward reads the lane: its gradients belong to other tokens' ones."""
        return any(demand.kind != "window" for demand in self.demands)

    @property
    def signature(self) -> tuple[object, ...]:
        numbers = {node: number for number, node in enumerate(self.cone)}
        read = [(demand.kind, numbers[demand.node]) for demand in self.demands]
        others = (looks(node) for node in self.cone if node is not self.item)
        return (self.item.target, len(shape_of(self.item)), *read, *others)

    def wide(self, node: fx.Node) -> bool:
        return numel(node) >= self.wide_numel

    def is_made_of_wide(self, node: fx.Node) -> bool:
        """Whether a node outside of the cone is wide or reads wide values."""
        if node.op != "call_function":
            return False
        return self.wide(node) or any(map(self.wide, node.all_input_nodes))


def next_windows(joint: JointGraph, tried: set[str]) -> tuple[list[str], Windows] | None:
    """The windows of a wide value that was not tried yet."""
    for anchor, spec in joint.cached(anchors):
        found: dict[tuple[fx.Node, Spec, int], list[tuple[fx.Node, int, int]]] = {}
        for reading in readings(joint, anchor, spec):
            item = item_of(reading.node, reading.source, reading.spec)
            if item is not None:
                axis, start, stop = item
                place = reading.source, reading.spec, axis
                found.setdefault(place, []).append((reading.node, start, stop))
        for (source, held, axis), items in found.items():
            if source.name not in tried:
                wide_numel = WIDE_OF_ANCHOR * numel(anchor)
                return [source.name], Windows(source, held, axis, wide_numel, tuple(items))
    return None


def item_of(node: fx.Node, source: fx.Node, spec: Spec) -> tuple[int, int, int] | None:
    """Axis, start and stop of a node that takes some tokens; None of other nodes."""
    if value_of(source) is None or list(spec) != sorted(spec):
        return None
    taken = rows_taken(node) if node.target in TAKERS and node.all_input_nodes == [source] else None
    if taken is None or taken[0] not in spec or taken[1].step != 1 or not taken[1]:
        return None
    dim, rows = taken
    if len(rows) == shape_of(source)[dim] or (node.target is aten.select.int and len(spec) == 1):
        return None
    return spec.index(dim), rows.start, rows.stop


def item_spec(node: fx.Node, windows: Windows) -> Spec:
    """The token dims of an item."""
    dim = windows.spec[windows.axis]
    if node.target is aten.select.int:
        return tuple(d - (d > dim) for d in windows.spec if d != dim)
    shape = shape_of(node)
    return tuple(d for d in windows.spec if shape[d] != 1)


# ---- one lane ------------------------------------------------------------------------------------
def lane_of(joint: JointGraph, windows: Windows, item: tuple[fx.Node, int, int]) -> Lane:
    """The lane of an item.

    Raises:
        CannotTake: a wide value of it is needed otherwise than token by token.
    """
    node, start, stop = item
    share, (first, length) = (stop - start) / windows.grid[windows.axis], _bounds(node, windows)
    if [*map(generic, (first, first + length))] != [start, stop]:
        raise CannotTake(node, "ends behind the last token")
    lane = Lane(node, start, stop, first, length, share * windows.wide_numel, {}, [])
    spec = item_spec(node, windows)
    if not spec:
        raise CannotTake(node, "holds a single token")
    lane.cone[node] = spec
    for user in joint.nodes[joint.index[node] + 1 :]:
        operand = next((n for n in user.all_input_nodes if n in lane.cone), None)
        has_tensor = any(True for _ in tensors_of(user.meta.get("val")))
        if operand is None or user.op == "output" or not has_tensor:
            continue
        if user in joint.backward and sink_of(user, windows):
            continue
        result = ops.result_spec(user, operand, lane.cone[operand])
        if isinstance(result, tuple) and result != WHOLE and _agrees(user, result, lane):
            lane.cone[user] = result
    for node in joint.sorted(lane.cone):
        for reader in joint.users(node):
            if reader in lane.cone or (not lane.wide(node) and _sums_wide(reader, lane)):
                continue
            kind = _how_read(joint, windows, lane, node, reader)
            if kind == "window" and any(demand.node is node for demand in lane.demands[-1:]):
                continue
            lane.demands.append(Demand(kind, node, reader))
    lane.demands.sort(key=lambda demand: demand.kind)
    return lane


def _bounds(item: fx.Node, windows: Windows) -> tuple[Size, Size]:
    """The first token of an item, and the number of its tokens."""
    dim, is_one = windows.spec[windows.axis], item.target is aten.select.int
    given = argument(item, "index" if is_one else "start") or 0
    first = given.meta["val"] if isinstance(given, fx.Node) else given
    if generic(first) < 0:
        first += windows.source.meta["val"].shape[dim]
    return first, 1 if is_one else item.meta["val"].shape[dim]


def _agrees(node: fx.Node, spec: Spec, lane: Lane) -> bool:
    needs = ops.operand_specs(node, spec)
    if isinstance(needs, Refusal):
        return False
    return all(lane.cone.get(n, s) == s for n, s in needs.items())


def _how_read(
    joint: JointGraph, windows: Windows, lane: Lane, node: fx.Node, reader: fx.Node
) -> str:
    if windows.of_products and node in joint.backward and sink_of(reader, windows):
        return "sink"
    if not lane.wide(node):
        return "window"
    if windows.of_products and _sums_wide(reader, lane):
        return "sum"
    if node in joint.backward and sink_of(reader, windows):
        return "sink"
    raise CannotTake(reader, "needs a wide value otherwise than token by token")


def _sums_wide(reader: fx.Node, lane: Lane) -> bool:
    """Whether a node sums a wide value over the tokens of a lane, as a weight's gradient does."""
    wide = [n for n in reader.all_input_nodes if n in lane.cone and lane.wide(n)]
    if not wide or not (ops.is_matmul(reader) or ops.is_reduction(reader)):
        return False
    return ops.result_spec(reader, wide[0], lane.cone[wide[0]]) == SUM


def looks(node: fx.Node) -> str:
    """The op of a node and its arguments, but for operands and for a shape."""
    position = ops.row(node).shape_arg
    args = [None if i == position else argument for i, argument in enumerate(node.args)]
    return f"{node.target}{fx.map_arg((args, node.kwargs), lambda operand: None)}"


# ---- where a gradient is written -----------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Sink:
    """A value with all tokens into which the gradients of items are written.

    Attributes:
        node: the value; its dims from ``first`` on are those of the grid.
        pieces: each gradient that is written there, with its bounds along the axis.
    """

    node: fx.Node
    first: int
    pieces: tuple[tuple[fx.Node, int, int], ...]


def sink_of(node: fx.Node, windows: Windows) -> Sink | None:
    """The sink that a node is; None if it writes nothing to the windows' dims."""
    value, taken = value_of(node), rows_taken(node)
    if value is None or not is_static(value) or any(map(is_size, node.all_input_nodes)):
        return None
    if node.target is aten.cat.default:
        (dim,) = dims_of(node, value.dim(), "dim")
        each: Any = node.args[0]
        ends = [*itertools.accumulate(shape_of(piece)[dim] for piece in each)]
        pieces = tuple(zip(each, [0, *ends], ends, strict=False))
    elif node.target in SCATTERS and linearity.is_zero(node.args[0]) and taken is not None:
        dim, rows = taken
        if rows.step != 1:
            return None
        pieces = ((scattered_source(node), rows.start, rows.stop),)
    else:
        return None
    first, grid = dim - windows.axis, windows.grid
    is_there = first >= 0 and list(value.shape[first : first + len(grid)]) == grid
    return Sink(node, first, pieces) if is_there else None
