"""Lanes that are alike, computed together on all tokens (see join_windows.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder, SizeNodes
from mstpass.graph.chunk_form import add_chunk
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec, chunk_shape
from mstpass.normalize.lanes import Lane, Windows, is_item_op
from mstpass.normalize.parts import Parts, picked
from mstpass.walk import needed_first, walk

aten = torch.ops.aten
prims = torch.ops.prims
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class WindowGroup:
    """Lanes that are alike, and their values computed on all tokens, in chunk form (tokens.py)."""

    def __init__(self, joint: JointGraph, builder: Builder, windows: Windows, lanes: list[Lane]):
        self.builder, self.windows, self.lanes = builder, windows, lanes
        self.sizes = SizeNodes.of_inputs(builder)
        by_name = joint.by_name
        self.cone = {by_name[n.name]: spec for n, spec in lanes[0].cone.items()}
        self.nodes: dict[fx.Node, list[fx.Node]] = {}  # of the first lane -> of all lanes
        self.known: dict[tuple[fx.Node, Spec], fx.Node] = {}
        self.num_tokens = math.prod(self.windows.grid)
        covered = sum(lane.stop - lane.start for lane in lanes)
        self.has_all_tokens = covered == self.windows.grid[self.windows.axis]
        self.item = by_name[lanes[0].item.name]
        self.nodes[self.item] = [by_name[lane.item.name] for lane in lanes]

    # ---- values on all tokens --------------------------------------------------------------------
    def merged(self, first: fx.Node, spec: Spec | None = None) -> fx.Node:
        """A value of the lanes, given by that of the first lane, for all tokens."""
        spec = self.cone[first] if spec is None else spec
        for one, held in needed_first((first, spec), self._needed, self.known):
            built = self._new(one, held)
            built.meta = {**replacement_meta(one), **built.meta}
            self.known[one, held] = built
        return self.known[first, spec]

    def _needed(self, key: tuple[fx.Node, Spec]) -> list[tuple[fx.Node, Spec]]:
        """The values for all tokens that one is computed from."""
        first, spec = key
        nodes, needs = self.nodes[first], ops.operand_specs(first, spec)
        if self._source(nodes, spec) or self._is_outside(first) or isinstance(needs, Refusal):
            return []
        self._match_operands(nodes)
        return [(n, s) for n, s in needs.items() if s != WHOLE]

    def _is_outside(self, first: fx.Node) -> bool:
        return first not in self.cone and not self.lanes[0].is_made_of_wide(first)

    def _new(self, first: fx.Node, spec: Spec) -> fx.Node:
        nodes = self.nodes[first]
        source = self._source(nodes, spec)
        if source is not None:
            built = chunk_shape(first.meta["val"].shape, spec, self.num_tokens)
            return self.sizes.reshaped(source, built)
        if self._is_outside(first):
            return self._side_by_side(nodes, spec)
        self._match_operands(nodes)
        return add_chunk(
            self.builder,
            first,
            spec,
            self.num_tokens,
            lambda n, s: self._whole(first, spec, n) if s == WHOLE else self.known[n, s],
            self.sizes,
        )

    def _match_operands(self, nodes: list[fx.Node]) -> None:
        """Note which operands of the lanes' nodes belong to each other."""
        operands = [_arguments(node) for node in nodes]
        if len(set(map(len, operands))) > 1:
            raise CannotTake(nodes[0], "the windows are worked on in different ways")
        for each in zip(*operands, strict=True):
            if len({type(argument) for argument in each}) > 1:
                raise CannotTake(nodes[0], "the windows are worked on in different ways")
            if isinstance(each[0], fx.Node) and self.nodes.setdefault(each[0], list(each)) != list(
                each
            ):
                raise CannotTake(nodes[0], "an operand of one window is two of another")

    def _whole(self, reader: fx.Node, reader_spec: Spec, node: fx.Node) -> fx.Node:
        """An operand without tokens."""
        nodes = self.nodes.get(node, [node])
        if node in self.cone:
            raise CannotTake(node, "every token needs all of it")
        if is_size(node) or all(_same_value(other, node) for other in nodes):
            return node
        spread = ops.is_pointwise(reader) or reader.target is aten.expand.default
        if numel(node) != 1 or not spread:
            raise CannotTake(node, "every token needs all of it")
        return self._one_per_token(reader, reader_spec, nodes)

    def _one_per_token(self, reader: fx.Node, spec: Spec, nodes: list[fx.Node]) -> fx.Node:
        """Numbers, one for each lane, written to every token of the lane."""
        rank = len(shape_of(reader))
        before, after = spec[0], rank - 1 - spec[-1]
        pieces = []
        for lane, node in zip(self.lanes, nodes, strict=True):
            number = self.sizes.reshaped(node, [1] * (before + len(self.windows.grid) + after))
            grid = [*[1] * before, *self._window_grid(lane), *[1] * after]
            pieces.append(self.builder.call(aten.expand.default, number, grid))
        shape = chunk_shape([1] * rank, spec, self.num_tokens)
        return self.sizes.reshaped(self._concatenated(pieces, before), shape)

    def _source(self, nodes: list[fx.Node], spec: Spec) -> fx.Node | None:
        """The value whose windows the nodes are; None if there is none."""
        first, windows = nodes[0], self.windows
        if not all(map(is_item_op, nodes)):
            return None
        source = first.all_input_nodes[0]
        if any(node.all_input_nodes[0] is not source for node in nodes):
            return None
        shape, grid = shape_of(source), windows.grid
        dim = windows.spec[windows.axis] if first is self.item else spec[0] + windows.axis
        if first is not self.item and list(shape[spec[0] : spec[0] + len(grid)]) != grid:
            return None
        for lane, node in zip(self.lanes, nodes, strict=True):
            if not _takes(node, dim, lane, shape):
                return None
        return source

    # ---- from lanes to all tokens, and back ------------------------------------------------------
    def _side_by_side(self, nodes: list[fx.Node], spec: Spec) -> fx.Node:
        """Values that exist lane by lane, such as labels, put together; zeros for other tokens."""
        _check_adjacent(nodes[0], spec)
        pieces = []
        for lane, node in zip(self.lanes, nodes, strict=True):
            shape = list(node.meta["val"].shape)
            before, after = shape[: spec[0]], shape[spec[-1] + 1 :]
            pieces.append(self.sizes.reshaped(node, [*before, *self._window_grid(lane), *after]))
        together = self._concatenated(pieces, spec[0])
        shape = chunk_shape(nodes[0].meta["val"].shape, spec, self.num_tokens)
        return self.sizes.reshaped(together, shape)

    def _concatenated(self, pieces: list[fx.Node], first: int) -> fx.Node:
        """Values of the lanes, one after the other along the axis, with zeros in the gaps."""
        dim, reached = first + self.windows.axis, 0
        value = pieces[0].meta["val"]
        every: list[fx.Node] = []

        def fill(size: int) -> None:
            if size:
                shape = [size if d == dim else s for d, s in enumerate(value.shape)]
                zeros = self.sizes.arguments(shape)
                every.append(
                    self.builder.call(
                        aten.full.default, zeros, 0, dtype=value.dtype, device=value.device
                    )
                )

        for lane, piece in zip(self.lanes, pieces, strict=True):
            fill(lane.start - reached)
            every.append(piece)
            reached = lane.stop
        fill(self.windows.grid[self.windows.axis] - reached)
        return self.builder.call(aten.cat.default, every, dim) if len(every) > 1 else every[0]

    def mask(self, numbers: list[int]) -> fx.Node:
        """Which tokens of the grid the lanes with these numbers have."""
        device = self.lanes[0].item.meta["val"].device
        pieces = [
            self.builder.call(
                aten.full.default,
                self._window_grid(lane),
                number in numbers,
                dtype=torch.bool,
                device=device,
            )
            for number, lane in enumerate(self.lanes)
        ]
        return self._concatenated(pieces, 0)

    def on_grid(self, whole: fx.Node, first: fx.Node) -> fx.Node:
        """A value in chunk form with the dims of the grid."""
        spec = self.cone[first]
        _check_adjacent(first, spec)
        shape = list(first.meta["val"].shape)
        grid = [*shape[: spec[0]], *self.windows.grid, *shape[spec[-1] + 1 :]]
        return self.sizes.reshaped(whole, grid)

    def _window_grid(self, lane: Lane) -> list[int]:
        grid = list(self.windows.grid)
        grid[self.windows.axis] = lane.stop - lane.start
        return grid

    def windows_of(self, nodes: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """For each lane's value, the lane's window of the value on all tokens."""
        self.nodes.setdefault(nodes[0], nodes)
        whole = self.on_grid(self.merged(nodes[0]), nodes[0])
        dim = self.cone[nodes[0]][0] + self.windows.axis
        found = []
        for lane, node in zip(self.lanes, nodes, strict=True):
            window = self.builder.call(aten.slice.Tensor, whole, dim, lane.start, lane.stop)
            if not window.meta["val"].is_contiguous():  # views may follow
                window = self.builder.call(
                    aten.clone.default, window, memory_format=torch.contiguous_format
                )
            found.append((node, self.sizes.reshaped(window, list(node.meta["val"].shape))))
        return found

    def totals_of(
        self, nodes: list[fx.Node], readers: list[fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        """For each lane's sum of all elements: the sum of the lane's tokens' own sums."""
        self.nodes.setdefault(nodes[0], nodes)
        whole, spec = self.merged(nodes[0]), self.cone[nodes[0]]
        value = whole.meta["val"]
        wide = torch.float32 if value.dtype in _LOW_PRECISION else None
        features = [d for d in range(value.dim()) if d not in range(spec[0], spec[-1] + 1)]
        rows = self.builder.call(aten.sum.dim_IntList, whole, features, True, dtype=wide)
        grid = self.sizes.reshaped(rows, self.windows.grid)
        found = []
        for lane, node, reader in zip(self.lanes, nodes, readers, strict=True):
            window = self.builder.call(
                aten.slice.Tensor, grid, self.windows.axis, lane.start, lane.stop
            )
            total = self.builder.call(aten.sum.default, window)
            if reader.target is aten.mean.default:
                total = self.builder.call(aten.div.Tensor, total, numel(node))
            dtype = reader.meta["val"].dtype
            if total.meta["val"].dtype != dtype:
                total = self.builder.call(prims.convert_element_type.default, total, dtype)
            found.append((reader, self.sizes.reshaped(total, list(reader.meta["val"].shape))))
        return found

    def sum_of(self, nodes: list[fx.Node], readers: list[fx.Node]) -> fx.Node:
        """The sum of the lanes' sums over their tokens: one sum over all tokens."""
        if not self.has_all_tokens:
            raise CannotTake(readers[0], "sums over tokens outside of the windows")
        self.nodes.setdefault(nodes[0], nodes)
        self._match_operands(readers)
        first, spec = readers[0], self.cone[nodes[0]]
        needs = ops.sum_operands(first, nodes[0], spec)
        values = {
            n: self.merged(n, needs[n]) if needs.get(n) else self._whole(first, spec, n)
            for n in _arguments(first)
        }
        args, kwargs = fx.map_arg((first.args, first.kwargs), values.__getitem__)
        return self.builder.call(first.target, *args, **kwargs)


def _arguments(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _same_value(a: object, b: object) -> bool:
    """Whether two nodes are one, or the same constant, perhaps viewed."""
    for x, y in walk([(a, b)], _arguments_in_pairs):
        if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
            if x != y:
                return False
        elif x is not y:
            if not (ops.is_constant(x) or ops.is_cheap_view(x)) or x.target is not y.target:
                return False
            if x.kwargs != y.kwargs or len(x.args) != len(y.args):
                return False
    return True


def _arguments_in_pairs(pair: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    a, b = pair
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return []
    return [*zip(a.args, b.args, strict=True)]


def _takes(node: fx.Node, dim: int, lane: Lane, shape: torch.Size) -> bool:
    """Whether a slice or a selection takes the tokens of a lane."""
    rest = [lane.start, lane.stop - lane.start, shape[dim] - lane.stop]
    parts = Parts(dim, tuple(size for size in rest if size))
    return picked(node, parts) == (1 if lane.start else 0)


def _check_adjacent(node: fx.Node, spec: Spec) -> None:
    shape = shape_of(node)
    between = [d for d in range(spec[0], spec[-1] + 1) if d not in spec]
    if list(spec) != sorted(spec) or any(shape[d] != 1 for d in between):
        raise CannotTake(node, "its token dims are not adjacent")
