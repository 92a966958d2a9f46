"""One evaluator of values for other tokens than those for which the graph computes them.

A rewrite computes values for a part of their tokens, such as a window, or of those of windows for
all tokens. It says which values are *given*: these it takes from where they are. Every other value
is the same op on operands for the same tokens::

    value(node, spec):  given(node, spec)                      what the rewrite takes
                        node's op on value(operand, its spec)  everything else

Each value is computed once, at the current place in the graph, in chunk form (tokens.py): all of
its tokens are in one dim. *On a grid* it has one dim for each of the graph's token dims. Heads, and
parts (parts.py), are to their axis what tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import TOKEN_AXIS, Axis, add_chunk
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.sizes import Size, is_size, same_shape
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec
from mstpass.walk import needed_first

aten = torch.ops.aten


class Partial:
    """Values for the tokens of one grid, in a graph that is rewritten.

    Args:
        grid: the sizes of the token dims.
        axis: what there are ``length`` of; by default the tokens of the grid.
    """

    def __init__(
        self,
        rewriting: Rewriting,
        grid: Sequence[Size] = (),
        axis: Axis = TOKEN_AXIS,
        length: int | None = None,
    ):
        self.rewriting, self.joint = rewriting, rewriting.joint
        self.builder, self.sizes = rewriting.builder, rewriting.sizes
        self.grid, self.axis = list(grid), axis
        self.length: Size = math.prod(self.grid) if length is None else length
        self.known: dict[tuple[fx.Node, Spec], fx.Node] = {}

    # ---- what a rewrite says ---------------------------------------------------------------------
    def is_given(self, node: fx.Node, spec: Spec) -> bool:
        """Whether a value is not computed from its operands."""
        raise NotImplementedError

    def given(self, node: fx.Node, spec: Spec) -> fx.Node:
        """Such a value, in chunk form."""
        raise NotImplementedError

    def whole(self, node: fx.Node, reader: fx.Node, spec: Spec) -> fx.Node:
        """An operand without tokens, of a reader that has them in the dims of ``spec``."""
        return node

    # ---- values ----------------------------------------------------------------------------------
    def value(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The value of a node that has its tokens in these dims, in chunk form.

        Raises:
            CannotTake: it cannot be computed for the tokens.
            UnknownSize: a symbolic size cannot be written.
        """
        for one, held in needed_first((node, spec), self._needed, self.known):
            self.known[one, held] = built = self.compute(one, held)
            _pass_on_meta(self.rewriting, one, built)
        return self.known[node, spec]

    def _needed(self, key: tuple[fx.Node, Spec]) -> list[tuple[fx.Node, Spec]]:
        node, spec = key
        needs = {} if self.is_given(node, spec) else self.axis.operand_specs(node, spec)
        if isinstance(needs, Refusal):
            return []
        return [(n, s) for n, s in needs.items() if s != WHOLE and not is_size(n)]

    def compute(self, node: fx.Node, spec: Spec) -> fx.Node:
        if self.is_given(node, spec):
            return self.given(node, spec)

        def operand(one: fx.Node, held: Spec) -> fx.Node:
            if is_size(one):
                return one
            return self.known[one, held] if held else self.whole(one, node, spec)

        how = self.length, operand, self.sizes, self.axis
        return add_chunk(self.builder, node, spec, *how)

    def summed(self, node: fx.Node, operand: fx.Node, spec: Spec) -> fx.Node:
        """A node that sums over the tokens of an operand, over those of the grid."""
        needs = ops.sum_operands(node, operand, spec)
        each = {
            n: self.value(n, needs[n]) if needs.get(n) else self.whole(n, node, spec)
            for n in node.all_input_nodes
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), each.__getitem__)
        return self.builder.call(node.target, *args, **kwargs)

    # ---- forms of values -------------------------------------------------------------------------
    def in_chunk_form(self, value: fx.Node, like: fx.Node, spec: Spec) -> fx.Node:
        """A value for the tokens of the grid in chunk form; ``like`` has it for others."""
        return self.sizes.reshaped(value, self._chunk_shape(like, spec))

    def zeros(self, like: fx.Node, spec: Spec) -> fx.Node:
        """Zeros in that form."""
        shape = self.sizes.arguments(self._chunk_shape(like, spec))
        return self.builder.filled(shape, 0, like.meta["val"])

    def _chunk_shape(self, like: fx.Node, spec: Spec) -> list[Any]:
        (shape,) = self.axis.chunk_shapes(like, spec, self.length)
        return shape

    def on_grid(self, value: fx.Node, like: fx.Node, spec: Spec, grid: Sequence[Any]) -> fx.Node:
        """A value on a grid; ``like`` has it in its token dims.

        Raises:
            CannotTake: these are not next to each other.
        """
        return self.sizes.reshaped(value, grid_shape(like, spec, grid))

    def window(self, value: fx.Node, dim: int, bounds: Sequence[Any], like: fx.Node) -> fx.Node:
        """A slice of a value, in the shape of ``like``, and without gaps where that has none."""
        window = self.builder.call(aten.slice.Tensor, value, dim, *bounds)
        if like.meta["val"].is_contiguous() and not window.meta["val"].is_contiguous():
            form = torch.contiguous_format  # views may follow
            window = self.builder.call(aten.clone.default, window, memory_format=form)
        return self.sizes.reshaped(window, list(like.meta["val"].shape))


def grid_shape(node: fx.Node, spec: Spec, grid: Sequence[Any]) -> list[Any]:
    """The shape of a node's value with the dims of a grid in the place of its token dims.

    Raises:
        CannotTake: these are not next to each other.
    """
    sizes, shape = shape_of(node), list(node.meta["val"].shape)
    between = [d for d in range(spec[0], spec[-1] + 1) if d not in spec]
    if list(spec) != sorted(spec) or any(sizes[d] != 1 for d in between):
        raise CannotTake(node, "its token dims are not adjacent")
    return [*shape[: spec[0]], *grid, *shape[spec[-1] + 1 :]]


def replace_alike(rewriting: Rewriting, old: fx.Node, new: fx.Node) -> None:
    """Let all readers of a node read another one of the same form.

    Raises:
        CannotTake: it has another shape or dtype.
    """
    value, other = old.meta["val"], new.meta["val"]
    if not same_shape(value.shape, other.shape) or value.dtype != other.dtype:
        raise CannotTake(old, f"rewritten, it has shape {tuple(other.shape)} and {other.dtype}")
    _pass_on_meta(rewriting, old, new)
    rewriting.replace(old, new)


def _pass_on_meta(rewriting: Rewriting, old: fx.Node, new: fx.Node) -> None:
    """Let a node stand for another one; one that was there before stays what it is."""
    if new.name not in rewriting.joint.by_name:
        new.meta = {**replacement_meta(old), **new.meta}
