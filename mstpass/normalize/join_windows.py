"""Compute what is made from windows of a wide value on all of its tokens.

Some steps take finished logits apart: a trainer that sums the losses of ``logits.chunk(8)``, a loss
of ``logits[:, :-1]`` beside a z-loss on all logits. A region would end at the windows. An op that
works token by token gives the same for the tokens of a window if it runs on all tokens::

    forward:    f(x[a:b], t)                =  f(x, pad(t))[a:b]                    pad: with zeros
                f(x[:a], t_1), f(x[a:], t_2) are windows of one  f(x, cat(t_1, t_2))
    backward:   cat(g(x[:a]), g(x[a:]))     =  g(x)
                pad(g(x[a:b]))              =  where(the token is in the window, g(x), 0)

So windows that do not overlap and that are worked on alike (lanes.py) become one computation on all
tokens, and every other window one of its own. Tokens outside of all windows are computed for
nothing and left out by the ``where``, which is exact even if a value there is not finite.

A window stays as it is if a wide value of it is needed otherwise than token by token, or if the
windows that are worked on alike have less than ``LEAST_SHARE`` of the tokens.

Pseudo-code::

    for each wide value of which windows are taken:
        group its lanes: those that are alike, as long as their windows do not overlap
        for each group: write each demand of its lanes, computed on all tokens
        let the readers of demands read windows of these
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.chunk_form import add_chunk
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.order import Circle, in_order
from mstpass.graph.sizes import is_size, same_shape
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import WHOLE, CannotTake, Spec, chunk_shape
from mstpass.normalize.lanes import (
    Lane,
    Sink,
    Windows,
    is_item_op,
    lane_of,
    next_windows,
    sink_of,
    static_windows,
)
from mstpass.normalize.parts import Parts, picked

aten = torch.ops.aten
prims = torch.ops.prims
LEAST_SHARE = 0.5
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def join_windows(joint: JointGraph) -> tuple[JointGraph, frozenset[str]]:
    """Rewrite such windows, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that were changed or made; the graph itself if there is
        no such window.
    """
    changed: set[str] = set()
    given_up: set[str] = set()
    while (windows := next_windows(joint, given_up)) is not None:
        given_up.add(windows.source.name)
        with contextlib.suppress(CannotTake, UnknownSize, Circle):
            joint, names = _joined(joint, windows)
            changed |= names
    return joint, frozenset(changed)


def _joined(joint: JointGraph, windows: Windows) -> tuple[JointGraph, set[str]]:
    if not static_windows(windows):
        raise CannotTake(windows.source, "its token dims are not adjacent")
    lanes = [lane_of(joint, windows, item) for item in windows.items]
    if not any(demand.kind == "sink" for lane in lanes for demand in lane.demands):
        raise CannotTake(windows.source, "the backward reads no window")  # sink_token_slices.py
    groups = _groups(lanes)
    axis_size = windows.grid[windows.axis]
    for group in groups:
        if sum(lane.stop - lane.start for lane in group) < LEAST_SHARE * axis_size:
            raise CannotTake(group[0].item, "most tokens would be computed for nothing")
    copy = joint.copy()
    writer = _Writer(copy, windows, groups)
    writer.write()
    new = in_order(copy)
    known = set(joint.by_name)
    return new, {n.name for n in new.nodes if n.name not in known} | writer.changed


def _groups(lanes: list[Lane]) -> list[list[Lane]]:
    """Lanes that are alike and do not overlap, in the order of their tokens."""
    groups: list[list[Lane]] = []
    for lane in sorted(lanes, key=lambda lane: lane.start):
        for group in groups:
            alike = group[0].signature == lane.signature
            if alike and group[-1].stop <= lane.start and _same_op(group[0].item, lane.item):
                group.append(lane)
                break
        else:
            groups.append([lane])
    return groups


def _same_op(a: fx.Node, b: fx.Node) -> bool:
    return a.target is b.target and len(shape_of(a)) == len(shape_of(b))


class _Writer:
    """Writes the computations on all tokens, into a graph whose order is mended afterwards."""

    def __init__(self, joint: JointGraph, windows: Windows, groups: list[list[Lane]]):
        self.joint, self.windows, self.groups = joint, windows, groups
        self.builder = Builder(joint.module.graph, fake_mode_of(joint.nodes))
        self.sizes = SizeNodes.of_inputs(self.builder)
        self.changed: set[str] = set()

    def write(self) -> None:
        """Write all of them.

        Raises:
            CannotTake, UnknownSize: one cannot be computed on all tokens.
        """
        found: list[tuple[fx.Node, fx.Node]] = []
        gradients: dict[fx.Node, tuple[_Group, int, fx.Node]] = {}
        readers: dict[fx.Node, None] = {}
        with self.builder.graph.inserting_before(self.joint.output):
            for lanes in self.groups:
                group = _Group(self, lanes)
                for demands in zip(*(lane.demands for lane in lanes), strict=True):
                    here = [self._node(demand.node) for demand in demands]
                    if demands[0].kind == "window":
                        found.extend(group.windows_of(here))
                    elif demands[0].kind == "total":
                        found.extend(group.totals_of(here, [self._node(d.reader) for d in demands]))
                    else:
                        group.nodes.setdefault(here[0], here)
                        for number, demand in enumerate(demands):
                            gradients[here[number]] = group, number, here[0]
                            readers[demand.reader] = None
            for reader in readers:
                sink = sink_of(reader, self.windows)
                found.append((self._node(sink.node), self._sink(sink, gradients)))
        for old, new in found:
            self._replace(old, new)

    def _node(self, node: fx.Node) -> fx.Node:
        """The node of the copy."""
        return self.joint.by_name[node.name]

    def _sink(self, sink: Sink, gradients: dict[fx.Node, tuple[_Group, int, fx.Node]]) -> fx.Node:
        """The gradients of all tokens, each where it belongs, and zeros elsewhere."""
        value = self._node(sink.node).meta["val"]
        numbers: dict[_Group, list[int]] = {}
        firsts: dict[_Group, fx.Node] = {}
        for piece, start, stop in sink.pieces:
            known = gradients.get(self._node(_without_views(piece, gradients, self._node)))
            if known is None:
                raise CannotTake(piece, "another gradient is written beside those of the windows")
            group, number, first = known
            lane = group.lanes[number]
            if (lane.start, lane.stop) != (start, stop) or firsts.setdefault(
                group, first
            ) is not first:
                raise CannotTake(piece, "is written to other tokens")
            numbers.setdefault(group, []).append(number)
        result: fx.Node | None = None
        for group, of_group in numbers.items():
            whole = group.on_grid(group.merged(firsts[group]), firsts[group])
            whole = self.reshaped(whole, list(value.shape))
            if len(of_group) < len(group.lanes) or not group.has_all_tokens:
                mask = self.reshaped(group.mask(of_group), self._mask_shape(sink, value))
                rest = result
                if rest is None:
                    rest = self.builder.call(
                        aten.full.default, [], 0, dtype=value.dtype, device=value.device
                    )
                whole = self.builder.call(aten.where.self, mask, whole, rest)
            result = whole
        assert result is not None
        return result

    def _mask_shape(self, sink: Sink, value: torch.Tensor) -> list[Any]:
        grid = self.windows.grid
        after = value.dim() - sink.first - len(grid)
        return [*[1] * sink.first, *grid, *[1] * after]

    def reshaped(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        if same_shape(node.meta["val"].shape, shape):
            return node
        return self.builder.call(aten.reshape.default, node, self.sizes.arguments(shape))

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        value, other = old.meta["val"], new.meta["val"]
        if not same_shape(value.shape, other.shape) or value.dtype != other.dtype:
            raise CannotTake(old, f"on all tokens it has shape {tuple(other.shape)}")
        self.changed.update(user.name for user in old.users)
        new.meta = {**replacement_meta(old), **new.meta}
        old.replace_all_uses_with(new)


class _Group:
    """Lanes that are alike, and their values computed on all tokens, in chunk form (tokens.py)."""

    def __init__(self, writer: _Writer, lanes: list[Lane]):
        self.writer, self.lanes = writer, lanes
        self.builder, self.windows = writer.builder, writer.windows
        by_name = writer.joint.by_name
        self.cone = {by_name[n.name]: spec for n, spec in lanes[0].cone.items()}
        self.nodes: dict[fx.Node, list[fx.Node]] = {}  # of the first lane -> of all lanes
        self.known: dict[tuple[fx.Node, Spec], fx.Node] = {}
        self.num_tokens = math.prod(self.windows.grid)
        covered = sum(lane.stop - lane.start for lane in lanes)
        self.has_all_tokens = covered == self.windows.grid[self.windows.axis]
        self.nodes[by_name[lanes[0].item.name]] = [by_name[lane.item.name] for lane in lanes]

    # ---- values on all tokens --------------------------------------------------------------------
    def merged(self, first: fx.Node, spec: Spec | None = None) -> fx.Node:
        """A value of the lanes, given by that of the first lane, for all tokens."""
        spec = self.cone[first] if spec is None else spec
        key = (first, spec)
        if key not in self.known:
            built = self._new(first, spec)
            built.meta = {**replacement_meta(first), **built.meta}
            self.known[key] = built
        return self.known[key]

    def _new(self, first: fx.Node, spec: Spec) -> fx.Node:
        nodes = self.nodes[first]
        source = self._windowed(nodes, spec)
        if source is not None:
            return source
        if first not in self.cone and not self.lanes[0].is_made_of_wide(first):
            return self._side_by_side(nodes, spec)
        self._match_operands(nodes)
        return add_chunk(
            self.builder,
            first,
            spec,
            self.num_tokens,
            lambda n, s: self._operand(first, n, s),
            self.writer.sizes,
        )

    def _match_operands(self, nodes: list[fx.Node]) -> None:
        """Note which operands of the lanes' nodes belong to each other."""
        operands = [_arguments(node) for node in nodes]
        for each in zip(*operands, strict=True):
            if len({type(argument) for argument in each}) > 1:
                raise CannotTake(nodes[0], "the windows are worked on in different ways")
            if isinstance(each[0], fx.Node) and self.nodes.setdefault(each[0], list(each)) != list(
                each
            ):
                raise CannotTake(nodes[0], "an operand of one window is two of another")

    def _operand(self, reader: fx.Node, node: fx.Node, spec: Spec) -> fx.Node:
        nodes = self.nodes.get(node, [node])
        if spec != WHOLE:
            return self.merged(node, spec)
        if node in self.cone:
            raise CannotTake(node, "every token needs all of it")
        if is_size(node) or all(_same_value(other, node) for other in nodes):
            return node
        spread = ops.is_pointwise(reader) or reader.target is aten.expand.default
        if numel(node) != 1 or not spread or reader not in self.cone:
            raise CannotTake(node, "every token needs all of it")
        return self._one_per_token(reader, nodes)

    def _one_per_token(self, reader: fx.Node, nodes: list[fx.Node]) -> fx.Node:
        """Numbers, one for each lane, written to every token of the lane."""
        spec, rank = self.cone[reader], len(shape_of(reader))
        before, after = spec[0], rank - 1 - spec[-1]
        pieces = []
        for lane, node in zip(self.lanes, nodes, strict=True):
            number = self.writer.reshaped(node, [1] * (before + len(self.windows.grid) + after))
            grid = [*[1] * before, *self._window_grid(lane), *[1] * after]
            pieces.append(self.builder.call(aten.expand.default, number, grid))
        shape = chunk_shape([1] * rank, spec, self.num_tokens)
        return self.writer.reshaped(self._concatenated(pieces, before), shape)

    def _windowed(self, nodes: list[fx.Node], spec: Spec) -> fx.Node | None:
        """The value whose windows the nodes are, in chunk form; None if there is none."""
        first = nodes[0]
        if not all(is_item_op(node) for node in nodes):
            return None
        sources = {node.all_input_nodes[0] for node in nodes}
        if len(sources) != 1:
            return None
        (source,) = sources
        grid, axis = self.windows.grid, self.windows.axis
        shape, at = shape_of(source), spec[0]
        if list(shape[at : at + len(grid)]) != grid:
            whole = first is self.writer.joint.by_name[self.lanes[0].item.name]
            if not whole:
                return None
            at = self.windows.spec[0]
        for lane, node in zip(self.lanes, nodes, strict=True):
            if not _takes(node, at + axis, lane, shape):
                return None
        built = chunk_shape(first.meta["val"].shape, spec, self.num_tokens)
        return self.writer.reshaped(source, built)

    # ---- from lanes to all tokens, and back ------------------------------------------------------
    def _side_by_side(self, nodes: list[fx.Node], spec: Spec) -> fx.Node:
        """Values that exist lane by lane, such as labels, put together; zeros for other tokens."""
        _check_adjacent(nodes[0], spec)
        pieces = []
        for lane, node in zip(self.lanes, nodes, strict=True):
            shape = list(node.meta["val"].shape)
            before, after = shape[: spec[0]], shape[spec[-1] + 1 :]
            pieces.append(self.writer.reshaped(node, [*before, *self._window_grid(lane), *after]))
        together = self._concatenated(pieces, spec[0])
        shape = chunk_shape(nodes[0].meta["val"].shape, spec, self.num_tokens)
        return self.writer.reshaped(together, shape)

    def _concatenated(self, pieces: list[fx.Node], first: int) -> fx.Node:
        """Values of the lanes, one after the other along the axis, with zeros in the gaps."""
        dim, reached = first + self.windows.axis, 0
        value = pieces[0].meta["val"]
        every: list[fx.Node] = []

        def fill(size: int) -> None:
            if size:
                shape = [size if d == dim else s for d, s in enumerate(value.shape)]
                zeros = self.writer.sizes.arguments(shape)
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
        return self.writer.reshaped(whole, grid)

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
            found.append((node, self.writer.reshaped(window, list(node.meta["val"].shape))))
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
        grid = self.writer.reshaped(rows, self.windows.grid)
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
            found.append((reader, self.writer.reshaped(total, list(reader.meta["val"].shape))))
        return found


def _arguments(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _same_value(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are one, or the same constant, perhaps viewed."""
    if a is b:
        return True
    if not (ops.is_constant(a) or ops.is_cheap_view(a)) or a.target is not b.target:
        return False
    if a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(
        _same_value(x, y) if isinstance(x, fx.Node) and isinstance(y, fx.Node) else x == y
        for x, y in zip(a.args, b.args, strict=True)
    )


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


def _without_views(piece: fx.Node, gradients: Any, of_copy: Any) -> fx.Node:
    """The gradient that a piece shows in another shape."""
    while of_copy(piece) not in gradients and ops.is_cheap_view(piece):
        if numel(piece) != numel(piece.all_input_nodes[0]):
            break
        piece = piece.all_input_nodes[0]
    return piece
