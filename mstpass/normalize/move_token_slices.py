"""Move a slice over tokens, such as ``logits[:, :-1]``, from a matmul's result to its operand.

    forward:    slice(x @ w)      =  slice(x) @ w
    backward:   scatter(g) @ w'   =  scatter(g @ w')       scatter: writes g into zeros
                scatter(g)' @ x   =  g' @ slice(x)          a sum over tokens

A selection of tokens by their numbers, ``logits[rows]``, moves in the same way; its scatter adds g
to the rows of zeros.

The same holds for every op between the matmul and the slice that is token-parallel, and in the
backward for every op that is linear in the scattered gradient. Tokens that the slice drops are then
never computed, and the region has a single set of tokens, as a loop needs. The results are the
same, except for the order of the sums over tokens.

Terms:
    *window*: the tokens that the slice, or the vector of numbers, selects (partial.py).
    *small value*: a value for the tokens of the window alone (partial.py).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Container, Mapping

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import JointGraph, descendants, numel, value_of
from mstpass.graph.recompute_rules import compared
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated
from mstpass.graph.sizes import generic, generic_shape
from mstpass.graph.tokens import SUM, CannotTake, Refusal, Spec
from mstpass.normalize.partial import (
    Choice,
    Partial,
    are_distinct,
    choice_of,
    choices,
    grid_shape,
    grid_spec,
    is_scatter,
    replace_alike,
    row_index,
    scattered_source,
    slice_bounds,
)
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors
from mstpass.walk import walk_once

aten = torch.ops.aten


def move_slices(joint: JointGraph) -> Rewritten:
    """Move the slices of wide values over tokens, in a copy of the graph.

    A slice stays where it is if it cannot be moved, for example because the other tokens of the
    logits are used as well.

    Returns:
        The copy and the names of the matmuls in it that became smaller; the graph itself if no
        slice was moved.
    """
    return repeated(joint, _next_sliced_matmul, lambda *match: _SliceMover(*match).move())


@dataclasses.dataclass(frozen=True)
class _SlicedMatmul:
    """A matmul that widens, of whose result only one choice of tokens is used.

    Attributes:
        spec: the token dims of the matmul's result.
        slices: the slices, or the selections, of the result or of wide values computed from it.
    """

    matmul: fx.Node
    spec: Spec
    window: Choice
    slices: list[fx.Node]


def _next_sliced_matmul(
    joint: JointGraph, tried: Container[str]
) -> tuple[list[str], _SlicedMatmul] | None:
    """The largest such matmul that was not tried; None if there is none."""
    for anchor, spec in joint.cached(anchors):
        slices = [] if anchor.name in tried else choices(joint, anchor, spec)
        windows = {choice_of(node, source_spec) for node, source_spec in slices}
        window = windows.pop() if len(windows) == 1 else None
        if window is not None:
            nodes = [node for node, _ in slices]
            return [anchor.name], _SlicedMatmul(anchor, spec, window, nodes)
    return None


class _SliceMover(Partial):
    """Moves the slices of one matmul, all with the same window, in a copy of the graph."""

    def __init__(self, joint: JointGraph, sliced: _SlicedMatmul):
        rewriting = Rewriting(joint)
        by_name, self.choice = rewriting.joint.by_name, sliced.window
        self.matmul, self.spec = by_name[sliced.matmul.name], sliced.spec
        self.slices = [by_name[node.name] for node in sliced.slices]
        self.wide_numel = WIDE_OF_ANCHOR * numel(self.matmul)
        self.derived = descendants([self.matmul])  # and itself
        # What equals a maximum is looked for in small values, so it is the maximum of these.
        self.derived |= set[fx.Node]().union(*map(compared, rewriting.joint.nodes))
        first = self.slices[0]
        spec, rows = self._source_spec(first), row_index(first)
        super().__init__(rewriting, [first.meta["val"].shape[d] for d in spec])
        self.every = [first.all_input_nodes[0].meta["val"].shape[d] for d in spec]
        self.bounds, self.rows = [] if rows is not None else slice_bounds(first)[:2], rows
        if rows is not None:
            for reader in rows.users:
                self.sizes.learn(reader)
            with rewriting.graph.inserting_before(first):
                self.sizes.learn_dim(rows, 0)
        # gradients that are zero outside of the window, and those that write it into zeros
        self.scattered, self.scatters = _scattered_gradients(
            self.joint, self.choice, self.wide_numel
        )

    def move(self) -> tuple[JointGraph, list[str]]:
        """The new graph, and the name of the smaller matmul in it.

        Raises:
            CannotTake: tokens outside of the window are used as well.
            UnknownSize: a symbolic size cannot be written.
        """
        # One pass in the graph's order: a small value, computed where it is first needed, is then
        # there for all that need it later. Slices may stand between gradients that read the same
        # values, as the derivative of an activation is computed there, of forward values alone.
        for node in self.joint.nodes:
            with self.rewriting.graph.inserting_before(node):
                if node in self.slices:
                    small = self.value(node.all_input_nodes[0], self._source_spec(node))
                    shape = list(node.meta["val"].shape)
                    replace_alike(self.rewriting, node, self.sizes.reshaped(small, shape))
                else:
                    self._use_small_gradients(node)
        moved = self.known.get((self.matmul, self.spec))
        new = self.rewriting.finished()
        if moved is None or any(n is self.matmul for n in new.nodes):
            raise CannotTake(self.matmul, "the tokens that a slice drops are used as well")
        return new, [moved.name]

    def _source_spec(self, node: fx.Node) -> Spec:
        """The token dims of the value that a slice reads, which have the sizes of the grid."""
        source = value_of(node.all_input_nodes[0])
        assert source is not None, "the source is known"
        window = self.choice
        spec = grid_spec(node, generic_shape(source), window.grid, window.axis)
        if spec is None:
            raise CannotTake(node, "its token dims are not those of the window")
        return spec

    # ---- small values: those of the window's tokens ---------------------------------------------
    def is_given(self, node: fx.Node, spec: Spec) -> bool:
        computed = node in self.scattered or self._must_recompute(node)
        return node in self.scatters or not computed

    def _must_recompute(self, node: fx.Node) -> bool:
        """Whether to compute the small value anew instead of slicing the node's value.

        No node may need wide values, or values that depend on the matmul, for all tokens.
        """
        if self.rows is not None and ops.is_cheap_view(node):  # to select copies
            return True
        if node.target is operator.getitem:  # the small results of an op, such as attention, exist
            return node in self.derived
        wide = numel(node) >= self.wide_numel and not isinstance(ops.lookup(node), Refusal)
        return wide or node in self.derived

    def given(self, node: fx.Node, spec: Spec) -> fx.Node:
        if node in self.scatters:
            return self.in_chunk_form(scattered_source(node), node, spec)
        held, window = [generic(node.meta["val"].shape[d]) for d in spec], list(self.choice.grid)
        merged = 1 in (len(spec), len(window)) and math.prod(held) == math.prod(window)
        if not merged and held != window:
            raise CannotTake(node, "its token dims differ from those of the slice")
        every = self.on_grid(node, node, spec, self.every)
        dim = spec[0] + self.choice.axis
        if self.rows is None:
            small = self.builder.call(aten.slice.Tensor, every, dim, *self.bounds)
        else:
            small = self.builder.call(aten.index.Tensor, every, [*[None] * dim, self.rows])
        return self.in_chunk_form(small, node, spec)

    def _padded(self, operand: fx.Node, spec: Spec) -> fx.Node:
        """A small value among zeros, in the shape of that of all tokens."""
        value, dim = operand.meta["val"], spec[0] + self.choice.axis
        source = self.on_grid(self.value(operand, spec), operand, spec, self.grid)
        shape = self.sizes.arguments(grid_shape(operand, spec, self.every))
        zeros = self.builder.filled(shape, 0, value)
        if self.rows is None:
            every = self.builder.call(aten.slice_scatter.default, zeros, source, dim, *self.bounds)
        else:
            indices, adds = [*[None] * dim, self.rows], not are_distinct(self.rows)
            every = self.builder.call(aten.index_put.default, zeros, indices, source, adds)
        return self.sizes.reshaped(every, list(value.shape))

    # ---- backward: scattered gradients ----------------------------------------------------------
    def _use_small_gradients(self, node: fx.Node) -> None:
        """Let a node that reads scattered gradients read small values instead.

        A node that is itself a scattered gradient is left alone: its small value replaces it. A sum
        over tokens adds up the small values. Any other node gets narrow gradients scattered again.
        """
        operands = [i for i in node.all_input_nodes if i in self.scattered]
        if node in self.scattered or not operands:
            return
        result = (
            Refusal("is an output of the graph")
            if node.op == "output"
            else ops.result_spec(node, operands[0], self.scattered[operands[0]])
        )
        if result == SUM:
            total = self.summed(node, operands[0], self.scattered[operands[0]])
            replace_alike(self.rewriting, node, total)
            return
        for operand in operands:
            if value_of(operand) is None or numel(operand) >= self.wide_numel:
                reason = result.reason if isinstance(result, Refusal) else "is not linear in it"
                raise CannotTake(node, f"reads a wide gradient of sliced tokens: {reason}")
            self.rewriting.replace(operand, self._padded(operand, self.scattered[operand]), [node])


# ---- gradients that are zero outside of the window -----------------------------------------------
# The backward of ``y = x[:, :-1]`` *scatters* the gradient of y into zeros of the shape of x; that
# of ``y = x[rows]`` adds it to the rows of such zeros. Every value that is computed from the result
# by ops that are linear and token-parallel is also zero outside of the window, so it need not be
# computed there.
def _scatter_spec(node: fx.Node, window: Choice, wide_numel: float) -> Spec | None:
    """The token dims of a wide value that a node makes by scattering the window into zeros.

    None if the node is no such scatter.
    """
    if not is_scatter(node) or not linearity.is_zero(node.args[0]):
        return None
    value = value_of(node)
    if value is None or numel(node) < wide_numel:
        return None
    spec = grid_spec(node, generic_shape(value), window.grid, window.axis)
    return spec if spec is not None and choice_of(node, spec) == window else None


def _scattered_gradients(
    joint: JointGraph, window: Choice, wide_numel: float
) -> tuple[dict[fx.Node, Spec], set[fx.Node]]:
    """The backward values that are zero outside of the window.

    Narrow values count only if they read wide ones or lead to them.

    Returns:
        The token dims of each value, and those of the values that are the scatters themselves.
    """
    specs: dict[fx.Node, Spec] = {}
    scatters: set[fx.Node] = set()
    for node in joint.nodes:
        if node not in joint.backward or node.op != "call_function":
            continue
        spec = _scatter_spec(node, window, wide_numel)
        if spec is not None:
            scatters.add(node)
        else:
            spec = _spec_if_zero_outside(node, specs)
        if spec is not None:
            specs[node] = spec
    wide = {node for node in specs if numel(node) >= wide_numel}
    operands = lambda node: (n for n in node.all_input_nodes if n in specs)
    reading_wide = (node for node in specs if not wide.isdisjoint((node, *node.all_input_nodes)))
    kept = set(walk_once(reading_wide, operands))
    return {node: spec for node, spec in specs.items() if node in kept}, scatters


def _spec_if_zero_outside(node: fx.Node, specs: Mapping[fx.Node, Spec]) -> Spec | None:
    """The token dims of a node that is linear in operands that are zero outside; else None."""
    operands = {i for i in node.all_input_nodes if i in specs}
    if not operands or not ops.row(node).is_linear(node, operands):
        return None
    operand = next(iter(operands))
    result = ops.result_spec(node, operand, specs[operand])
    if not isinstance(result, tuple):
        return None
    required = ops.operand_specs(node, result)
    if isinstance(required, Refusal) or any(required[i] != specs[i] for i in operands):
        return None
    return result
