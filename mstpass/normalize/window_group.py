"""Lanes that are alike, computed together on all tokens (see join_windows.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import numel
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.sizes import Size, generic, is_size
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import CannotTake, Spec, chunk_shape
from mstpass.normalize.lanes import Lane, Windows, looks
from mstpass.normalize.partial import TAKERS, Partial, rows_taken

aten = torch.ops.aten


class WindowGroup(Partial):
    """Lanes that are alike, and their values on all tokens.

    A node of the first lane stands for those of all lanes.
    """

    def __init__(self, rewriting: Rewriting, windows: Windows, lanes: list[Lane]):
        shape = windows.source.meta["val"].shape
        super().__init__(rewriting, [shape[dim] for dim in windows.spec])
        self.windows, self.lanes = windows, lanes
        by_name = self.joint.by_name
        self.cone = {by_name[n.name]: spec for n, spec in lanes[0].cone.items()}
        covered = sum(lane.stop - lane.start for lane in lanes)
        self.has_all_tokens = covered == windows.grid[windows.axis]
        self.item = by_name[lanes[0].item.name]
        # of the first lane -> of all lanes
        self.nodes = {self.item: [by_name[lane.item.name] for lane in lanes]}

    # ---- values on all tokens --------------------------------------------------------------------
    def is_given(self, node: fx.Node, spec: Spec) -> bool:
        if self._source(node, spec) is not None:
            return True
        if node not in self.cone and not self.lanes[0].is_made_of_wide(node):
            return True
        self._match_operands(self.nodes[node])
        return False

    def given(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The value of which the lanes take items; or values that exist lane by lane, such as
        labels, put together."""
        together = self._source(node, spec)
        if together is None:
            lanes = zip(self.lanes, self.nodes[node], strict=True)
            pieces = [self.on_grid(n, n, spec, self._window_grid(lane)) for lane, n in lanes]
            together = self._concatenated(pieces, spec[0])
        return self.in_chunk_form(together, node, spec)

    def _match_operands(self, nodes: list[fx.Node]) -> None:
        """Note which operands of the lanes' nodes belong to each other."""
        operands = [_arguments(node) for node in nodes]
        if len(set(map(looks, nodes))) > 1 or len(set(map(len, operands))) > 1:
            raise CannotTake(nodes[0], "the windows are worked on in different ways")
        for each in zip(*operands, strict=True):
            if len({type(argument) for argument in each}) > 1:
                raise CannotTake(nodes[0], "the windows are worked on in different ways")
            first, every = each[0], list(each)
            if isinstance(first, fx.Node) and self.nodes.setdefault(first, every) != every:
                raise CannotTake(nodes[0], "an operand of one window is two of another")

    def whole(self, node: fx.Node, reader: fx.Node, spec: Spec) -> fx.Node:
        nodes = self.nodes.get(node, [node])
        if is_size(node) or all(_same_value(other, node) for other in nodes):
            if node not in self.cone:
                return node
        spread = ops.is_pointwise(reader) or reader.target is aten.expand.default
        if node in self.cone or numel(node) != 1 or not spread:
            raise CannotTake(node, "every token needs all of it")
        return self._one_per_token(reader, spec, nodes)

    def _one_per_token(self, reader: fx.Node, spec: Spec, nodes: list[fx.Node]) -> fx.Node:
        """Numbers, one for each lane, written to every token of the lane."""
        rank = len(shape_of(reader))
        before, after = spec[0], rank - 1 - spec[-1]
        pieces = []
        for lane, node in zip(self.lanes, nodes, strict=True):
            number = self.sizes.reshaped(node, [1] * (before + len(self.grid) + after))
            grid = self.sizes.arguments([*[1] * before, *self._window_grid(lane), *[1] * after])
            pieces.append(self.builder.call(aten.expand.default, number, grid))
        shape = chunk_shape([1] * rank, spec, self.length)
        return self.sizes.reshaped(self._concatenated(pieces, before), shape)

    def _source(self, node: fx.Node, spec: Spec) -> fx.Node | None:
        """The value whose windows the lanes' nodes are; None if there is none."""
        nodes, windows = self.nodes[node], self.windows
        if any(node.target not in TAKERS for node in nodes):
            return None
        source = node.all_input_nodes[0]
        if any(other.all_input_nodes[0] is not source for other in nodes):
            return None
        shape, grid = shape_of(source), windows.grid
        dim = windows.spec[windows.axis] if node is self.item else spec[0] + windows.axis
        if node is not self.item and list(shape[spec[0] : spec[0] + len(grid)]) != grid:
            return None
        pairs = zip(self.lanes, nodes, strict=True)
        windows_taken = (rows_taken(n) == (dim, range(lane.start, lane.stop)) for lane, n in pairs)
        return source if all(windows_taken) else None

    # ---- from lanes to all tokens, and back ------------------------------------------------------
    def _concatenated(self, pieces: list[fx.Node], first: int) -> fx.Node:
        """Values of the lanes, one after the other along the axis, with zeros in the gaps."""
        dim, value = first + self.windows.axis, pieces[0].meta["val"]
        reached: Size = 0
        every: list[fx.Node] = []

        def fill(size: Size) -> None:
            if generic(size):
                shape = [size if d == dim else s for d, s in enumerate(value.shape)]
                every.append(self.builder.filled(self.sizes.arguments(shape), 0, value))

        for lane, piece in zip(self.lanes, pieces, strict=True):
            fill(lane.first - reached)
            every.append(piece)
            reached = lane.first + lane.length
        fill(self.grid[self.windows.axis] - reached)
        return self.builder.call(aten.cat.default, every, dim) if len(every) > 1 else every[0]

    def mask(self, numbers: list[int]) -> fx.Node:
        """Which tokens of the grid the lanes with these numbers have."""
        kind = {"dtype": torch.bool, "device": self.item.meta["val"].device}
        grids = (self.sizes.arguments(self._window_grid(lane)) for lane in self.lanes)
        pieces = [
            self.builder.call(aten.full.default, grid, n in numbers, **kind)
            for n, grid in enumerate(grids)
        ]
        return self._concatenated(pieces, 0)

    def merged(self, nodes: list[fx.Node]) -> fx.Node:
        """A value of each lane, for all tokens on the grid."""
        first = nodes[0]
        self.nodes.setdefault(first, nodes)
        spec = self.cone[first]
        return self.on_grid(self.value(first, spec), first, spec, self.grid)

    def _window_grid(self, lane: Lane) -> list[Size]:
        grid = list(self.grid)
        grid[self.windows.axis] = lane.length
        return grid

    def windows_of(self, nodes: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """For each lane's value, the lane's window of the value on all tokens."""
        whole, dim = self.merged(nodes), self.cone[nodes[0]][0] + self.windows.axis
        ends = ([lane.first, lane.first + lane.length] for lane in self.lanes)
        return [
            (node, self.window(whole, dim, self.sizes.arguments(bounds), node))
            for bounds, node in zip(ends, nodes, strict=True)
        ]

    def sum_of(self, nodes: list[fx.Node], readers: list[fx.Node]) -> fx.Node:
        """The sum of the lanes' sums over their tokens: one sum over all tokens."""
        if not self.has_all_tokens:
            raise CannotTake(readers[0], "sums over tokens outside of the windows")
        self.nodes.setdefault(nodes[0], nodes)
        self._match_operands(readers)
        return self.summed(readers[0], nodes[0], self.cone[nodes[0]])


def _arguments(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _same_value(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are one, or the same constant, perhaps viewed."""
    while a is not b:
        known = ops.is_constant(a) or ops.is_cheap_view(a)
        if not known or looks(a) != looks(b) or shape_of(a) != shape_of(b):
            return False
        if not a.all_input_nodes:
            return True
        a, b = a.all_input_nodes[0], b.all_input_nodes[0]
    return True
