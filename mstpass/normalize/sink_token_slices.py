"""Move a slice over tokens from a wide value to the narrow values of each token made from it.

    argmax(x[:, :-1])  =  argmax(x)[:, :-1]

holds for every token-parallel op. Other operands that have sliced tokens, such as labels, get zeros
for the tokens that the slice drops; what is computed of these tokens is dropped again.

An accuracy is often taken of ``logits[:, :-1]`` beside a loss on all logits, with shifted labels.
All tokens are used, so the slice cannot move to the operand of the matmul (move_token_slices.py),
and a region would end at it. Sliced late, the value of each token is computed in the region, for a
few tokens more.

A slice stays where it is if the backward reads what is made from it: a gradient would have to be
scattered.

Pseudo-code::

    for each slice of a wide value over tokens, in the forward:
        cone = the values made from it        ends = the narrow ones that are made from wide ones
        compute the cone and the ends for all tokens, in chunk form; slice the ends
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import UnknownSize
from mstpass.graph.chunk_form import add_chunk
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import Size, is_size
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec
from mstpass.normalize.token_window import (
    slice_bounds,
    sliced_dim,
    slices_over_tokens,
    window_of,
)
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors
from mstpass.walk import needed_first

aten = torch.ops.aten


def sink_slices(joint: JointGraph) -> Rewritten:
    """Sink such slices, in a copy of the graph.

    Returns:
        The copy and the names of the narrow values that are computed for all tokens in it; the
        graph itself if no slice was moved.
    """
    sunk: set[str] = set()
    given_up: set[str] = set()
    while (found := _next_slice(joint, given_up)) is not None:
        sliced, spec, wide_numel = found
        given_up.add(sliced.name)
        try:
            sinker = _SliceSinker(joint, sliced.name, spec)
            joint, names = sinker.sink(wide_numel)
            sunk |= names
            given_up |= sinker.windows  # they slice narrow values, and would move on for ever
        except (_Stays, CannotTake, UnknownSize):
            pass
    return joint, frozenset(sunk)


class _Stays(Exception):
    """What is made from a slice cannot be computed for all tokens."""


def _next_slice(joint: JointGraph, given_up: set[str]) -> tuple[fx.Node, Spec, float] | None:
    """A slice that was not tried yet, the spec of what it slices, and what is wide there."""
    for anchor, spec in joint.cached(anchors):
        for sliced, source_spec in slices_over_tokens(joint, anchor, spec):
            if sliced.name not in given_up and window_of(sliced, source_spec) is not None:
                return sliced, source_spec, WIDE_OF_ANCHOR * numel(anchor)
    return None


class _SliceSinker:
    """Moves one slice, in a copy of the graph."""

    def __init__(self, joint: JointGraph, name: str, spec: Spec):
        self.rewriting = Rewriting(joint)
        self.joint, self.builder = self.rewriting.joint, self.rewriting.builder
        self.sizes = self.rewriting.sizes
        self.sliced = self.joint.by_name[name]
        self.source = self.sliced.all_input_nodes[0]
        _check_adjacent(spec)
        self.grid: list[Size] = [self.source.meta["val"].shape[dim] for dim in spec]
        self.window_grid: list[Size] = [self.sliced.meta["val"].shape[dim] for dim in spec]
        self.axis = sliced_dim(self.sliced) - spec[0]
        self.bounds: list[Any] = slice_bounds(self.sliced)[:2]
        self.cone: dict[fx.Node, Spec] = {self.sliced: spec}
        self.full: dict[fx.Node, fx.Node] = {}  # in chunk form, with all tokens
        self.windows: set[str] = set()  # names of the new slices

    def sink(self, wide_numel: float) -> tuple[JointGraph, set[str]]:
        """The new graph, and the names of the ends in it.

        Raises:
            _Stays, CannotTake: a value made from the slice cannot be computed for all tokens.
            UnknownSize: a symbolic size cannot be written.
        """
        graph = self.joint.module.graph
        windows = []
        for end in self._ends(wide_numel):
            spec = self.cone[end]
            _check_adjacent(spec)
            with graph.inserting_before(end):
                windows.append((end, self._window_of(self._in_full(end, spec), end, spec)))
        for end, window in windows:  # only now: ends are operands of each other
            self.rewriting.replace(end, window)
        names = {self.full[end].name for end, _ in windows}
        return self.rewriting.finished(), names

    def _ends(self, wide_numel: float) -> list[fx.Node]:
        """The narrow values that are made from wide ones; fills the cone.

        The cone holds narrow values as well, which wide ones may read: the sum in a softmax.
        """
        ends = []
        wide = {self.sliced}
        for node in self.joint.nodes[self.joint.index[self.sliced] + 1 :]:
            operand = next((n for n in node.all_input_nodes if n in self.cone), None)
            if operand is None:
                continue
            reads_wide = not wide.isdisjoint(node.all_input_nodes)
            spec = self._spec_of(node, operand)
            if spec is None:
                if reads_wide:
                    raise _Stays
                continue
            self.cone[node] = spec
            if value_of(node) is None or numel(node) >= wide_numel:
                wide.add(node)
            elif reads_wide:
                ends.append(node)
        if not ends:
            raise _Stays
        return ends

    def _spec_of(self, node: fx.Node, operand: fx.Node) -> Spec | None:
        """The token dims of a forward value that has them; None for all other nodes."""
        if node.op == "output" or node in self.joint.backward:
            return None
        spec = ops.result_spec(node, operand, self.cone[operand])
        return spec if isinstance(spec, tuple) and spec != WHOLE else None

    def _in_full(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The node's value for all tokens, in chunk form, computed before the current place."""
        tokens = math.prod(self.grid)
        for one in needed_first(node, self._needed, self.full):
            held = spec if one is node else self.cone[one]
            if one is self.sliced:
                built = self.sizes.reshaped(self.source, _chunk_form(one, held, tokens))
            else:
                built = add_chunk(self.builder, one, held, tokens, self._operand, self.sizes)
            self.full[one] = built
            _pass_on_meta(one, built)
        return self.full[node]

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        needs = ops.operand_specs(node, self.cone[node])
        if node is self.sliced or isinstance(needs, Refusal):
            return []
        return [n for n, s in needs.items() if self.cone.get(n, WHOLE) == s != WHOLE]

    def _operand(self, node: fx.Node, spec: Spec) -> fx.Node:
        if is_size(node) or (spec == WHOLE and node not in self.cone):
            return node
        if node not in self.cone:
            return self._padded(node, spec)
        if self.cone[node] != spec:
            raise _Stays
        return self.full[node]

    def _padded(self, node: fx.Node, spec: Spec) -> fx.Node:
        """A value of the sliced tokens, such as their labels, with zeros for the other tokens."""
        if node not in self.full:
            _check_adjacent(spec)
            value = node.meta["val"]
            before, after = value.shape[: spec[0]], value.shape[spec[-1] + 1 :]
            source = self.sizes.reshaped(node, [*before, *self.window_grid, *after])
            zeros = self.builder.call(
                aten.full.default,
                self.sizes.arguments([*before, *self.grid, *after]),
                0,
                dtype=value.dtype,
                device=value.device,
            )
            dim, bounds = spec[0] + self.axis, self.bounds
            padded = self.builder.call(aten.slice_scatter.default, zeros, source, dim, *bounds)
            tokens = math.prod(self.grid)
            self.full[node] = self.sizes.reshaped(padded, _chunk_form(node, spec, tokens))
        return self.full[node]

    def _window_of(self, full: fx.Node, end: fx.Node, spec: Spec) -> fx.Node:
        """The sliced tokens of a value in chunk form, in the shape that ``end`` has."""
        shape = list(end.meta["val"].shape)
        before, after = shape[: spec[0]], shape[spec[-1] + 1 :]
        grid = self.sizes.reshaped(full, [*before, *self.grid, *after])
        dim = spec[0] + self.axis
        window = self.builder.call(aten.slice.Tensor, grid, dim, *self.bounds)
        self.windows.add(window.name)
        if end.meta["val"].is_contiguous() and not window.meta["val"].is_contiguous():
            window = self.builder.call(
                aten.clone.default, window, memory_format=torch.contiguous_format
            )  # views may follow
            self.windows.add(window.name)
        window = self.sizes.reshaped(window, shape)
        _pass_on_meta(end, window)
        return window


def _chunk_form(node: fx.Node, spec: Spec, tokens: Size) -> list[Size]:
    shape = list(node.meta["val"].shape)
    ones = [1] * (len(spec) - 1)
    return [*shape[: spec[0]], *ones, tokens, *shape[spec[-1] + 1 :]]


def _check_adjacent(spec: Spec) -> None:
    if list(spec) != list(range(spec[0], spec[0] + len(spec))):
        raise _Stays


def _pass_on_meta(old: fx.Node, new: fx.Node) -> None:
    new.meta = {**replacement_meta(old), **new.meta}
