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
    *window*: the tokens that the slice, or the vector of numbers, selects (token_window.py).
    *small value*: a value for the tokens of the window alone, in chunk form (tokens.py): all of its
        tokens are in one dim.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import UnknownSize
from mstpass.graph.chunk_form import add_chunk
from mstpass.graph.joint import JointGraph, descendants, numel, value_of
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import Size, generic, generic_shape, is_size, same_shape
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, Spec, chunk_shape
from mstpass.normalize.scattered_gradients import scattered_gradients
from mstpass.normalize.token_window import (
    Choice,
    SlicedMatmul,
    are_distinct,
    first_sliced_matmul,
    grid_spec,
    row_index,
    scattered_source,
    slice_bounds,
)
from mstpass.regions.anchors import WIDE_OF_ANCHOR
from mstpass.walk import needed_first

aten = torch.ops.aten


def move_slices(joint: JointGraph) -> Rewritten:
    """Move the slices of wide values over tokens, in a copy of the graph.

    A slice stays where it is if it cannot be moved, for example because the other tokens of the
    logits are used as well.

    Returns:
        The copy and the names of the matmuls in it that became smaller; the graph itself if no
        slice was moved.
    """
    moved: set[str] = set()
    given_up: set[str] = set()
    while (sliced := first_sliced_matmul(joint, given_up)) is not None:
        try:
            joint, name = _SliceMover(joint, sliced.window).move(sliced)
            moved.add(name)
        except (CannotTake, UnknownSize):
            given_up.add(sliced.matmul.name)
    return joint, frozenset(moved)


class _SliceMover:
    """Moves the slices of one matmul, all with the same window, in a copy of the graph."""

    def __init__(self, joint: JointGraph, window: Choice):
        self.rewriting, self.window = Rewriting(joint), window
        self.joint, self.builder = self.rewriting.joint, self.rewriting.builder
        self.sizes = self.rewriting.sizes
        # The window as it is written in the graph: sizes before and after the slice, and bounds.
        self.grid: list[Size] = []
        self.window_grid: list[Size] = []
        self.bounds: list[Any] = []  # of a slice
        self.rows: fx.Node | None = None  # the numbers of the rows, where the window has such
        self.small: dict[tuple[fx.Node, Spec], fx.Node] = {}
        self.scattered: dict[fx.Node, Spec] = {}  # gradients that are zero outside of the window
        self.scatters: set[fx.Node] = set()  # those of them that write the window into zeros
        self.wide_numel = 0.0
        self.derived: set[fx.Node] = set()  # the matmul and all nodes that depend on it

    def move(self, sliced: SlicedMatmul) -> tuple[JointGraph, str]:
        """The new graph, and the name of the smaller matmul in it.

        Raises:
            CannotTake: tokens outside of the window are used as well.
            UnknownSize: a symbolic size cannot be written.
        """
        graph = self.joint.module.graph
        matmul = self.joint.by_name[sliced.matmul.name]
        self.wide_numel = WIDE_OF_ANCHOR * numel(matmul)
        self.derived = descendants([matmul])
        slices = [self.joint.by_name[node.name] for node in sliced.slices]
        self._read_window(slices[0])
        self.scattered, self.scatters = scattered_gradients(
            self.joint, self.window, self.wide_numel
        )
        # One pass in the graph's order: a small value, computed where it is first needed, is then
        # there for all that need it later. Slices may stand between gradients that read the same
        # values, as the derivative of an activation is computed there, of forward values alone.
        for node in self.joint.nodes:
            with graph.inserting_before(node):
                if node in slices:
                    small = self._small(node.all_input_nodes[0], self._source_spec(node))
                    self._replace(node, self.sizes.reshaped(small, list(node.meta["val"].shape)))
                else:
                    self._use_small_gradients(node)
        moved = self.small.get((matmul, sliced.spec))
        new = self.rewriting.finished()
        if moved is None or any(n is matmul for n in new.nodes):
            raise CannotTake(matmul, "the tokens that a slice drops are used as well")
        return new, moved.name

    def _read_window(self, node: fx.Node) -> None:
        """Note the sizes and the bounds as one of the slices has them."""
        spec = self._source_spec(node)
        self.grid = [node.all_input_nodes[0].meta["val"].shape[d] for d in spec]
        self.window_grid = [node.meta["val"].shape[d] for d in spec]
        self.rows = row_index(node)
        if self.rows is None:
            self.bounds = slice_bounds(node)[:2]
            return
        for reader in self.rows.users:
            self.sizes.learn(reader)
        with self.joint.module.graph.inserting_before(node):
            self.sizes.learn_dim(self.rows, 0)

    def _source_spec(self, node: fx.Node) -> Spec:
        """The token dims of the value that a slice reads, which have the sizes of the grid."""
        source = value_of(node.all_input_nodes[0])
        assert source is not None, "the source is known"
        window = self.window
        spec = grid_spec(node, generic_shape(source), window.grid, window.axis)
        if spec is None:
            raise CannotTake(node, "its token dims are not those of the window")
        return spec

    # ---- small values: those of the window's tokens ---------------------------------------------
    def _small(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The small value of a node, computed before the current place in the graph."""
        if spec == WHOLE:
            return node
        for one, held in needed_first((node, spec), self._needed, self.small):
            if one in self.scatters:
                small = self._flattened(scattered_source(one), one, held)
            elif self._is_computed(one):
                tokens = math.prod(self.window_grid)
                small = add_chunk(self.builder, one, held, tokens, self._operand, self.sizes)
                _pass_on_meta(one, small)
            else:
                small = self._sliced(one, held)
            self.small[one, held] = small
        return self.small[node, spec]

    def _is_computed(self, node: fx.Node) -> bool:
        return node in self.scattered or self._must_recompute(node)

    def _needed(self, key: tuple[fx.Node, Spec]) -> list[tuple[fx.Node, Spec]]:
        """The small values that one is computed from."""
        node, spec = key
        needs = ops.operand_specs(node, spec)
        if node in self.scatters or not self._is_computed(node) or isinstance(needs, Refusal):
            return []
        return [(n, s) for n, s in needs.items() if s != WHOLE and not is_size(n)]

    def _operand(self, node: fx.Node, spec: Spec) -> fx.Node:
        return node if is_size(node) or spec == WHOLE else self.small[node, spec]

    def _must_recompute(self, node: fx.Node) -> bool:
        """Whether to compute the small value anew instead of slicing the node's value.

        No node may need wide values, or values that depend on the matmul, for all tokens.
        """
        if self.rows is not None and ops.is_cheap_view(node):  # to select copies, to slice does not
            return True
        if node.target is operator.getitem:  # the small results of an op, such as attention, exist
            return node in self.derived
        wide = numel(node) >= self.wide_numel and not isinstance(ops.lookup(node), Refusal)
        return wide or node in self.derived

    def _sliced(self, node: fx.Node, spec: Spec) -> fx.Node:
        grid = self._on_grid(node, spec)
        dim = min(spec) + self.window.axis
        if self.rows is None:
            small = self.builder.call(aten.slice.Tensor, grid, dim, *self.bounds)
        else:
            small = self.builder.call(aten.index.Tensor, grid, [*[None] * dim, self.rows])
        return self._flattened(small, node, spec)

    def _on_grid(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The value with one dim for each token dim of the grid, next to each other."""
        shape = list(node.meta["val"].shape)
        sizes = [generic(size) for size in shape]
        held = [sizes[d] for d in spec]
        between = [d for d in range(spec[0], spec[-1] + 1) if d not in spec]
        apart = 1 not in (len(spec), len(self.window.grid))
        merged = not apart and math.prod(held) == math.prod(self.window.grid)
        if not merged and held != list(self.window.grid):
            raise CannotTake(node, "its token dims differ from those of the slice")
        if any(sizes[d] != 1 for d in between) or list(spec) != sorted(spec):
            raise CannotTake(node, "its token dims are not adjacent")
        return self.sizes.reshaped(node, [*shape[: spec[0]], *self.grid, *shape[spec[-1] + 1 :]])

    def _flattened(self, small: fx.Node, node: fx.Node, spec: Spec) -> fx.Node:
        """The window's tokens of a node's value, in chunk form (tokens.py)."""
        shape, tokens = node.meta["val"].shape, math.prod(self.window_grid)
        return self.sizes.reshaped(small, chunk_shape(shape, spec, tokens))

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
            self._replace(node, self._sum(node, operands[0]))
            return
        for operand in operands:
            if value_of(operand) is None or numel(operand) >= self.wide_numel:
                reason = result.reason if isinstance(result, Refusal) else "is not linear in it"
                raise CannotTake(node, f"reads a wide gradient of sliced tokens: {reason}")
            scattered = self._scatter(operand, self.scattered[operand])
            self.rewriting.replace(operand, scattered, [node])

    def _sum(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        required = ops.sum_operands(node, operand, self.scattered[operand])
        small = {n: self._small(n, spec) for n, spec in required.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: small.get(n, n))
        return self.builder.call(node.target, *args, **kwargs)

    def _scatter(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The small value of a gradient, written into zeros for all tokens."""
        value = node.meta["val"]
        small = self._small(node, spec)
        shape = list(value.shape)
        before, after = shape[: spec[0]], shape[spec[-1] + 1 :]
        source = self.sizes.reshaped(small, [*before, *self.window_grid, *after])
        zeros = self.builder.call(
            aten.full.default,
            self.sizes.arguments([*before, *self.grid, *after]),
            0,
            dtype=value.dtype,
            device=value.device,
        )
        return self.sizes.reshaped(self._put(zeros, source, spec[0] + self.window.axis), shape)

    def _put(self, zeros: fx.Node, source: fx.Node, dim: int) -> fx.Node:
        if self.rows is None:
            return self.builder.call(aten.slice_scatter.default, zeros, source, dim, *self.bounds)
        indices, adds = [*[None] * dim, self.rows], not are_distinct(self.rows)
        return self.builder.call(aten.index_put.default, zeros, indices, source, adds)

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        if not same_shape(new.meta["val"].shape, node.meta["val"].shape):
            raise CannotTake(node, f"moved, it has shape {tuple(new.meta['val'].shape)}")
        _pass_on_meta(node, new)
        self.rewriting.replace(node, new)


def _pass_on_meta(old: fx.Node, new: fx.Node) -> None:
    new.meta = {**replacement_meta(old), **new.meta}
