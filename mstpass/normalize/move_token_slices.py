"""Move a slice over tokens, such as ``logits[:, :-1]``, from a matmul's result to its operand.

    forward:    slice(x @ w)      =  slice(x) @ w
    backward:   scatter(g) @ w'   =  scatter(g @ w')       scatter: into zeros, where the slice was
                scatter(g)' @ x   =  g' @ slice(x)          a sum over tokens

and likewise for every op between the two that treats tokens independently (forward) or is linear
in the scattered gradient (backward). What was dropped is never computed, and the region has one set
of tokens, which the loops need. The results are equal, but for the order of the sums over tokens.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.chunk_form import add_chunk
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.sizes import Size, generic, generic_shape, is_size, same_shape
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec
from mstpass.regions.detect import anchors

aten = torch.ops.aten
_WIDE_OF_ANCHOR = 0.4


@dataclasses.dataclass(frozen=True)
class Window:
    """A slice of the tokens; two are equal where they select the same.

    Attributes:
        grid: the token dims' sizes, such as (B, S), symbolic ones at the generic point of sizes.py.
        axis: the sliced one of them.
        start, stop: as in ``range``; the step is 1.
    """

    grid: tuple[int, ...]
    axis: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A joint graph whose slices are moved, and the names of the matmuls that became smaller."""

    joint: JointGraph
    moved: frozenset[str]


def move_slices(joint: JointGraph) -> Hoisted | None:
    """A new joint graph without slices over the tokens of wide values; None where there are none.

    A slice that cannot be moved, say because the whole logits are used as well, stays.
    """
    moved: list[str] = []
    given_up: set[str] = set()
    current = joint
    while True:
        found = _first_window(current, given_up)
        if found is None:
            break
        anchor, spec, window, slices = found
        try:
            current, name = _Hoist(current, window).run(anchor.name, spec, [s.name for s in slices])
            moved.append(name)
        except (CannotTake, UnknownSize):
            given_up.add(anchor.name)
    return Hoisted(current, frozenset(moved)) if moved else None


Found = tuple[fx.Node, Spec, Window, list[fx.Node]]


def _first_window(joint: JointGraph, given_up: set[str]) -> Found | None:
    """The largest matmul whose tokens are sliced, in one way, by those who read it."""
    for anchor, spec in joint.cached(anchors):
        if anchor.name in given_up:
            continue
        slices = _slices(joint, anchor, spec)
        windows = {_window(node, at) for node, at in slices}
        if len(windows) == 1 and None not in windows:
            (window,) = windows
            assert window is not None
            return anchor, spec, window, [node for node, _ in slices]
    return None


def _slices(joint: JointGraph, anchor: fx.Node, spec: Spec) -> list[tuple[fx.Node, Spec]]:
    """Forward slices over the tokens of the anchor's value or of wide ones made from it."""
    specs: dict[fx.Node, Spec] = {anchor: spec}
    found = []
    for node in _readers(joint, anchor, specs):
        for operand in node.all_input_nodes:
            if operand not in specs or node in joint.backward:
                continue
            if node.target is aten.slice.Tensor and _dim(node) in specs[operand]:
                found.append((node, specs[operand]))
                break
            result = ops.result_spec(node, operand, specs[operand]) if node.op != "output" else SUM
            if isinstance(result, tuple) and numel(node) >= _WIDE_OF_ANCHOR * numel(anchor):
                specs[node] = result
    return found


def _readers(joint: JointGraph, anchor: fx.Node, carries: Container[fx.Node]) -> Iterator[fx.Node]:
    """In the graph's order, the users of the anchor and of those of them that ``carries`` holds."""
    behind = [joint.index[user] for user in anchor.users]
    heapq.heapify(behind)
    last = None
    while behind:
        i = heapq.heappop(behind)
        if i == last:
            continue
        yield joint.nodes[i]
        if joint.nodes[i] in carries:
            for user in joint.nodes[i].users:
                heapq.heappush(behind, joint.index[user])
        last = i


def _dim(node: fx.Node) -> int:
    position = 2 if node.target is aten.slice_scatter.default else 1
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    value = node.meta["val"]
    assert isinstance(dim, int)
    return int(dim % value.dim())


def _window(node: fx.Node, spec: Spec) -> Window | None:
    """What a slice or slice_scatter over a token dim selects; None where its step is not 1."""
    value = node.meta["val"] if _scatters(node) else value_of(node.all_input_nodes[0])
    if value is None:
        return None
    dim, shape = _dim(node), generic_shape(value)
    start, stop, step = map(_number, _bounds(node))
    if step not in (None, 1) or dim not in spec:
        return None
    first, last, _ = slice(start, stop).indices(shape[dim])
    if last <= first:
        return None
    return Window(tuple(shape[d] for d in spec), spec.index(dim), first, last)


def _scatters(node: fx.Node) -> bool:
    return node.target is aten.slice_scatter.default


def _bounds(node: fx.Node) -> list[Any]:
    """The start, stop and step of a slice or slice_scatter, as arguments."""
    given = node.args[3 if _scatters(node) else 2 :]
    names = ("start", "end", "step")
    return [given[i] if len(given) > i else node.kwargs.get(n) for i, n in enumerate(names)]


def _number(argument: Any) -> int | None:
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    return None if value is None else generic(value)


class _Hoist:
    """One window moved, in a copy of the graph."""

    def __init__(self, joint: JointGraph, window: Window):
        self.joint, self.window = joint.copy(), window
        self.builder = Builder(self.joint.module.graph, fake_mode_of(self.joint.nodes))
        self.sizes = SizeNodes(self.builder)
        for node in self.joint.nodes:
            if node.op == "placeholder":
                self.sizes.learn(node)
        self.grid: list[Size] = []
        self.inner: list[Size] = []  # the grid's sizes that are left
        self.bounds: list[Any] = []
        self.small: dict[tuple[fx.Node, Spec], fx.Node] = {}
        self.scattered: dict[fx.Node, Spec] = {}  # zero outside the window
        self.scatters: set[fx.Node] = set()  # those of them that put the window into zeros
        self.wide_numel = 0.0
        self.derived: set[fx.Node] = set()  # the matmul and all that depends on it

    def run(self, anchor_name: str, spec: Spec, slices: list[str]) -> tuple[JointGraph, str]:
        graph = self.joint.module.graph
        anchor = self.joint.by_name[anchor_name]
        self.wide_numel = _WIDE_OF_ANCHOR * numel(anchor)
        self.derived = {anchor}
        for node in self.joint.nodes[self.joint.index[anchor] :]:
            if any(i in self.derived for i in node.all_input_nodes):
                self.derived.add(node)
        self._measure(self.joint.by_name[slices[0]])
        for name in slices:
            node = self.joint.by_name[name]
            source = node.all_input_nodes[0]
            with graph.inserting_before(node):
                found = self._spec_at(node)
                built = self._small(source, found)
                self._replace(node, self._reshaped(built, list(node.meta["val"].shape)))
        self._find_scattered()
        for node in self.joint.nodes:
            with graph.inserting_before(node):
                self._use_small(node)
        moved = self.small.get((anchor, spec))
        graph.eliminate_dead_code()
        if moved is None or any(n is anchor for n in graph.nodes):
            raise CannotTake(anchor, "the tokens that a slice drops are used as well")
        graph.lint()
        self.joint.module.recompile()
        return JointGraph(self.joint.module, self.joint.num_fwd_outputs), moved.name

    def _measure(self, node: fx.Node) -> None:
        """Sizes and bounds as they stand at a slice."""
        spec = self._spec_at(node)
        self.grid = [node.all_input_nodes[0].meta["val"].shape[d] for d in spec]
        self.inner = [node.meta["val"].shape[d] for d in spec]
        self.bounds = _bounds(node)[:2]

    def _spec_at(self, node: fx.Node) -> Spec:
        """The spec of a slice's operand: the dims whose sizes are the grid's, the axis its own."""
        source = value_of(node.all_input_nodes[0])
        assert source is not None
        first = _dim(node) - self.window.axis
        # Dims of size 1 may lie between; grids are adjacent dims everywhere else.
        spec = tuple(range(first, first + len(self.window.grid)))
        shape = generic_shape(source)
        if first < 0 or tuple(shape[d] for d in spec) != self.window.grid:
            raise CannotTake(node, "its token dims are not adjacent")
        return spec

    # ---- small values: those of the window's tokens ---------------------------------------------
    def _small(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The value of the window's tokens, in chunk form, added before the current node."""
        if spec == WHOLE:
            return node
        key = (node, spec)
        if key not in self.small:
            if node in self.scatters:
                self.small[key] = self._flattened(self._source(node), spec)
            elif node in self.scattered or self._must_redo(node):
                tokens = math.prod(self.inner)
                (rows,) = self.sizes.arguments([tokens])
                self.small[key] = add_chunk(self.builder, node, spec, tokens, self._operand, rows)
                _pass_on_meta(node, self.small[key])
            else:
                self.small[key] = self._sliced(node, spec)
        return self.small[key]

    def _operand(self, node: fx.Node, spec: Spec) -> fx.Node:
        return node if is_size(node) else self._small(node, spec)

    def _must_redo(self, node: fx.Node) -> bool:
        """Wide values, and what comes from the matmul: neither must be needed for all tokens."""
        wide = numel(node) >= self.wide_numel and not isinstance(ops.lookup(node), Refusal)
        return wide or node in self.derived

    def _sliced(self, node: fx.Node, spec: Spec) -> fx.Node:
        call = self.builder.call
        grid = self._on_grid(node, spec)
        dim = min(spec) + self.window.axis
        small = call(aten.slice.Tensor, grid, dim, *self.bounds)
        return self._flattened(small, spec)

    def _on_grid(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The value with one dim for each token dim of the grid."""
        shape = list(node.meta["val"].shape)
        sizes = tuple(generic(shape[d]) for d in spec)
        if sizes == self.window.grid and list(spec) == list(range(spec[0], spec[0] + len(spec))):
            return node
        if len(spec) != 1 or sizes[0] != math.prod(self.window.grid):
            raise CannotTake(node, "its token dims are others than the slice's")
        at = spec[0]
        return self._reshaped(node, [*shape[:at], *self.grid, *shape[at + 1 :]])

    def _flattened(self, grid: fx.Node, spec: Spec) -> fx.Node:
        """From the window's grid to chunk form: all tokens in the last of ``spec``'s dims."""
        shape = list(grid.meta["val"].shape)
        at, rank = spec[0], len(self.window.grid)
        ones = [1] * (len(spec) - 1)
        return self._reshaped(
            grid, [*shape[:at], *ones, math.prod(self.inner), *shape[at + rank :]]
        )

    def _reshaped(self, node: fx.Node, shape: list[Size]) -> fx.Node:
        if same_shape(node.meta["val"].shape, shape):
            return node
        return self.builder.call(aten.reshape.default, node, self.sizes.arguments(shape))

    # ---- backward: scattered gradients ----------------------------------------------------------
    def _source(self, node: fx.Node) -> fx.Node:
        source = node.args[1]
        assert isinstance(source, fx.Node)
        return source

    def _find_scattered(self) -> None:
        """Backward values that are zero outside the window, as far as wide ones come from them."""
        found: dict[fx.Node, Spec] = {}
        for node in self.joint.nodes:
            if node not in self.joint.backward or node.op != "call_function":
                continue
            spec = self._scatter_spec(node)
            if spec is not None:
                self.scatters.add(node)
            else:
                spec = self._zero_outside(node, found)
            if spec is not None:
                found[node] = spec
        wide = {node for node in found if numel(node) >= self.wide_numel}
        kept: set[fx.Node] = set()
        for node in reversed(found):  # those that are wide, that read wide ones, or lead to them
            reads = node in wide or any(i in wide for i in node.all_input_nodes)
            if reads or any(user in kept for user in node.users):
                kept.add(node)
        self.scattered = {node: spec for node, spec in found.items() if node in kept}

    def _zero_outside(self, node: fx.Node, found: dict[fx.Node, Spec]) -> Spec | None:
        operands = {i for i in node.all_input_nodes if i in found}
        row = ops.lookup(node)
        if not operands or isinstance(row, Refusal) or not row.linear(node, operands):
            return None
        operand = next(iter(operands))
        result = ops.result_spec(node, operand, found[operand])
        if not isinstance(result, tuple):
            return None
        needs = ops.operand_specs(node, result)
        if isinstance(needs, Refusal) or any(needs[i] != found[i] for i in operands):
            return None
        return result

    def _use_small(self, node: fx.Node) -> None:
        """Give a node outside what it needs of scattered gradients: a sum, or the whole value."""
        operands = [i for i in node.all_input_nodes if i in self.scattered]
        if node in self.scattered or not operands:
            return
        result = (
            Refusal("an output")
            if node.op == "output"
            else ops.result_spec(node, operands[0], self.scattered[operands[0]])
        )
        if result == SUM:
            self._replace(node, self._sum(node, operands[0]))
            return
        for operand in operands:
            if numel(operand) >= self.wide_numel:
                reason = result.reason if isinstance(result, Refusal) else "is not linear in it"
                raise CannotTake(node, f"reads a large gradient of sliced tokens: {reason}")
            node.replace_input_with(operand, self._scatter(operand, self.scattered[operand]))

    def _scatter_spec(self, node: fx.Node) -> Spec | None:
        if node.target is not aten.slice_scatter.default or not linearity.is_zero(node.args[0]):
            return None
        value = value_of(node)
        if value is None or numel(node) < self.wide_numel:
            return None
        first = _dim(node) - self.window.axis
        spec = tuple(range(first, first + len(self.window.grid)))
        if first < 0 or spec[-1] >= value.dim() or _window(node, spec) != self.window:
            return None
        return spec

    def _sum(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        needs = ops.sum_operands(node, operand, self.scattered[operand])
        if isinstance(needs, Refusal):
            raise CannotTake(node, needs.reason)
        small = {n: self._small(n, spec) for n, spec in needs.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: small.get(n, n))
        return self.builder.call(node.target, *args, **kwargs)

    def _scatter(self, node: fx.Node, spec: Spec) -> fx.Node:
        """A narrow gradient of the window's tokens back at its place among all."""
        value, call = node.meta["val"], self.builder.call
        small = self._small(node, spec)
        shape = list(value.shape)
        at, after = spec[0], spec[-1] + 1
        rest = shape[:at], shape[after:]
        source = self._reshaped(small, [*rest[0], *self.inner, *rest[1]])
        zeros = call(
            aten.full.default,
            self.sizes.arguments([*rest[0], *self.grid, *rest[1]]),
            0,
            dtype=value.dtype,
            device=value.device,
        )
        whole = call(aten.slice_scatter.default, zeros, source, at + self.window.axis, *self.bounds)
        return self._reshaped(whole, shape)

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        if not same_shape(new.meta["val"].shape, node.meta["val"].shape):
            raise CannotTake(node, f"moved, it has shape {tuple(new.meta['val'].shape)}")
        _pass_on_meta(node, new)
        node.replace_all_uses_with(new)


def _pass_on_meta(old: fx.Node, new: fx.Node) -> None:
    new.meta = {**replacement_meta(old), **new.meta}
