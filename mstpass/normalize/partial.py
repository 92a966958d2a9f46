"""One evaluator of values for other tokens than those for which the graph computes them.

A rewrite computes values for a part of their tokens, such as a window, or of those of windows for
all tokens. It says which values are *given*: these it takes from where they are. Every other value
is the same op on operands for the same tokens::

    value(node, spec):  given(node, spec)                      what the rewrite takes
                        node's op on value(operand, its spec)  everything else

Each value is computed once, at the current place in the graph, in chunk form (tokens.py): all of
its tokens are in one dim. *On a grid* it has one dim for each of the graph's token dims. Heads, and
parts (parts.py), are to their axis what tokens are.

It also says which wide values hold tokens, and which of these a slice, a selection or an index
takes."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import TOKEN_AXIS, Axis, add_chunk
from mstpass.graph.heads import slice_rows
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.sizes import Size, generic_shape, is_size, same_shape
from mstpass.graph.token_rules.arguments import argument, dims_of, shape_of
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, Spec
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors
from mstpass.walk import needed_first

aten = torch.ops.aten
TAKERS = (aten.select.int, aten.slice.Tensor)
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
_SLICES = (aten.slice.Tensor, aten.slice_scatter.default)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Some of the tokens of a value. Two choices are equal if they are the same tokens.

    Attributes:
        grid: the sizes of the token dims, such as (B, S), at the generic point (sizes.py).
        axis: the position in the grid of the dim along which they are taken.
        tokens: the numbers along that dim, or the name of the vector that holds them in its order;
            there a token may be taken twice.
    """

    grid: tuple[int, ...]
    axis: int
    tokens: range | str


# ---- what reads wide values ----------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Reading:
    """A node of the forward that reads a wide value, and the token dims of both.

    Attributes:
        result: the node's token dims, or why it has none.
    """

    node: fx.Node
    source: fx.Node
    spec: Spec
    result: Spec | Reduced | Refusal


def readings(joint: JointGraph, anchor: fx.Node, spec: Spec) -> Iterator[Reading]:
    """What reads a product and the wide values that are made of it token by token, in order."""
    specs: dict[fx.Node, Spec] = {anchor: spec}
    waiting = [joint.index[user] for user in anchor.users]
    heapq.heapify(waiting)
    last = None
    while waiting:
        i = heapq.heappop(waiting)
        node, seen, last = joint.nodes[i], i == last, i
        source = next((n for n in node.all_input_nodes if n in specs), None)
        if seen or source is None or node in joint.backward or node.op != "call_function":
            continue
        result = ops.result_spec(node, source, specs[source])
        yield Reading(node, source, specs[source], result)
        if isinstance(result, tuple) and result != WHOLE:
            if numel(node) >= WIDE_OF_ANCHOR * numel(anchor):
                specs[node] = result
                for user in node.users:
                    heapq.heappush(waiting, joint.index[user])


def downstream(joint: JointGraph) -> dict[fx.Node, tuple[Spec, fx.Node]]:
    """Of the anchors and the values that depend on them: the token dims, and the anchor.

    A node gets both from its first operand that has them. Values whose token dims the op table
    cannot follow are left out.
    """
    found = {anchor: (spec, anchor) for anchor, spec in joint.cached(anchors)}
    for node in joint.nodes:
        if node.op != "call_function" or node in found:
            continue
        source = next((operand for operand in node.all_input_nodes if operand in found), None)
        if source is None:
            continue
        spec, anchor = found[source]
        result = ops.result_spec(node, source, spec)
        if isinstance(result, tuple) and result != WHOLE:
            found[node] = result, anchor
    return found


# ---- one slice, selection or index, or what writes it into zeros ---------------------------------
def rows_taken(node: fx.Node) -> tuple[int, range] | None:
    """The dim along which a slice or a selection takes rows, or its counterpart writes them.

    And their numbers, at the generic point. None of other ops, and if a tensor says which one.
    """
    if node.target not in (*TAKERS, *SCATTERS):
        return None
    dim, size = taken_dim(node), shape_of(source_or_result(node))[taken_dim(node)]
    if node.target in _SLICES:
        return dim, slice_rows(node)
    index = argument(node, "index")
    return (dim, range(index % size, index % size + 1)) if isinstance(index, int) else None


def taken_dim(node: fx.Node) -> int:
    """The dim along which a choice is made or written, counted from the left."""
    if row_index(node) is not None:
        return 0
    (dim,) = dims_of(node, source_or_result(node).meta["val"].dim(), "dim")
    return dim


def source_or_result(node: fx.Node) -> fx.Node:
    """The value of which a node takes some tokens, or that it makes by writing them."""
    return node if is_scatter(node) else node.all_input_nodes[0]


def choice_of(node: fx.Node, spec: Spec) -> Choice | None:
    """The tokens that a slice or an index takes, or that its counterpart writes; None if it takes
    others, or some with gaps.

    Args:
        spec: the token dims of the value that is taken from, or that is written into.
    """
    shape = generic_shape(source_or_result(node).meta["val"])
    index = row_index(node)
    if index is not None:
        return Choice((shape[0],), 0, index.name) if spec == (0,) else None
    taken = rows_taken(node) if node.target in _SLICES else None
    if taken is None or taken[0] not in spec or taken[1].step != 1 or not taken[1]:
        return None
    if max(spec) >= len(shape):  # those of another value
        return None
    return Choice(tuple(shape[d] for d in spec), spec.index(taken[0]), taken[1])


def row_index(node: fx.Node) -> fx.Node | None:
    """The vector of row numbers with which a node reads rows, or writes each one's own values.

    None if the node does something else. Rows that are written are added up where a number stands
    in the vector twice.
    """
    if node.target not in (aten.index.Tensor, aten.index_put.default):
        return None
    indices: Any = argument(node, "indices")
    index = indices[0] if len(indices) == 1 else None
    if not isinstance(index, fx.Node):
        return None
    value = value_of(index)
    if value is None or value.dim() != 1 or value.dtype in (torch.bool, torch.uint8):
        return None
    if node.target is aten.index_put.default:
        written = value_of(node.args[2])  # type: ignore[arg-type]
        if written is None or not (argument(node, "accumulate") or are_distinct(index)):
            return None
        rows = [*generic_shape(value), *generic_shape(node.meta["val"])[1:]]
        if list(generic_shape(written)) != rows:
            return None
    return index


def are_distinct(rows: fx.Node) -> bool:
    """Whether no row number stands in the vector twice, as far as the graph tells."""
    return (
        rows.target is aten.squeeze.dim and rows.all_input_nodes[0].target is aten.nonzero.default
    )


def is_scatter(node: fx.Node) -> bool:
    """Whether the node writes the values of a choice."""
    return node.target in SCATTERS or (
        node.target is aten.index_put.default and row_index(node) is not None
    )


def scattered_source(node: fx.Node) -> fx.Node:
    """What such a node writes."""
    source = node.args[2 if node.target is aten.index_put.default else 1]
    assert isinstance(source, fx.Node), "the source is a node"
    return source


# ---- values for other tokens ---------------------------------------------------------------------


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
        needs = self.axis.sum_operands(node, operand, spec)
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
        return self.axis.chunk_shape(like, spec, self.length)

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
