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

import contextlib

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.tokens import WHOLE, CannotTake, Spec
from mstpass.normalize.partial import Chosen, Partial, replace_alike
from mstpass.normalize.token_window import choice_of, choices, slice_bounds, taken_dim
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

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
        with contextlib.suppress(CannotTake, UnknownSize):
            new, names = _SliceSinker(joint, sliced.name, spec).sink(wide_numel)
            sunk |= names
            given_up |= new.by_name.keys() - joint.by_name.keys()  # they would move on for ever
            joint = new
    return joint, frozenset(sunk)


def _next_slice(joint: JointGraph, given_up: set[str]) -> tuple[fx.Node, Spec, float] | None:
    """A slice that was not tried yet, the spec of what it slices, and what is wide there."""
    for anchor, spec in joint.cached(anchors):
        for sliced, source_spec in choices(joint, anchor, spec):
            if sliced.target is not aten.slice.Tensor or sliced.name in given_up:
                continue
            if choice_of(sliced, source_spec) is not None:
                return sliced, source_spec, WIDE_OF_ANCHOR * numel(anchor)
    return None


class _SliceSinker(Partial):
    """Moves one slice, in a copy of the graph: what is made from it has all tokens.

    Attributes:
        cone: the values made from the slice, with their token dims.
    """

    def __init__(self, joint: JointGraph, name: str, spec: Spec):
        rewriting = Rewriting(joint)
        self.sliced = rewriting.joint.by_name[name]
        self.source = self.sliced.all_input_nodes[0]
        super().__init__(rewriting, [self.source.meta["val"].shape[dim] for dim in spec])
        grid = [self.sliced.meta["val"].shape[dim] for dim in spec]
        axis = spec.index(taken_dim(self.sliced))
        self.chosen = Chosen(grid, axis, slice_bounds(self.sliced)[:2])
        self.cone: dict[fx.Node, Spec] = {self.sliced: spec}

    def sink(self, wide_numel: float) -> tuple[JointGraph, set[str]]:
        """The new graph, and the names of the ends in it.

        Raises:
            CannotTake: a value made from the slice cannot be computed for all tokens.
            UnknownSize: a symbolic size cannot be written.
        """
        ends = self._ends(wide_numel)
        windows = []
        for end in ends:
            spec = self.cone[end]
            with self.rewriting.graph.inserting_before(end):
                every = self.on_grid(self.value(end, spec), end, spec, self.grid)
                dim = spec[0] + self.chosen.axis
                windows.append(self.window(every, dim, self.chosen.bounds, end))
        for end, window in zip(ends, windows, strict=True):  # only now: ends read each other
            replace_alike(self.rewriting, end, window)
        names = {self.known[end, self.cone[end]].name for end in ends}
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
                    raise CannotTake(node, "needs a wide value of the slice in another way")
                continue
            self.cone[node] = spec
            if value_of(node) is None or numel(node) >= wide_numel:
                wide.add(node)
            elif reads_wide:
                ends.append(node)
        if not ends:
            raise CannotTake(self.sliced, "no narrow value is made from it")
        return ends

    def _spec_of(self, node: fx.Node, operand: fx.Node) -> Spec | None:
        """The token dims of a forward value that has them; None for all other nodes."""
        if node.op == "output" or node in self.joint.backward:
            return None
        spec = ops.result_spec(node, operand, self.cone[operand])
        return spec if isinstance(spec, tuple) and spec != WHOLE else None

    def is_given(self, node: fx.Node, spec: Spec) -> bool:
        if self.cone.get(node, spec) != spec:
            raise CannotTake(node, "its tokens are in other dims")
        return node is self.sliced or node not in self.cone

    def given(self, node: fx.Node, spec: Spec) -> fx.Node:
        """What was sliced; of a value of the sliced tokens alone, such as labels, zeros for all
        others."""
        value = self.source
        if node is not self.sliced:
            value = self.padded(node, node, spec, self.chosen, self.grid)
        return self.in_chunk_form(value, node, spec)

    def whole(self, node: fx.Node, reader: fx.Node, spec: Spec) -> fx.Node:
        if node in self.cone:
            raise CannotTake(reader, "every token needs all of the slice")
        return node
