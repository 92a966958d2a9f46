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

The tokens that are chosen are one part of the values that have all tokens, and the others another
one, which is never computed: where it is 0, as in a scattered gradient, it may be left out, and
elsewhere nothing may read it. How values are computed by parts is in unstack.py.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Container, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import TOKEN_AXIS, Axis
from mstpass.graph.joint import JointGraph, numel
from mstpass.graph.recompute_rules import compared
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated
from mstpass.graph.sizes import generic
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import CannotTake, Spec
from mstpass.normalize.partial import (
    Choice,
    Reading,
    are_distinct,
    choice_of,
    grid_shape,
    readings,
    row_index,
    taken_dim,
)
from mstpass.normalize.parts import Parts, PartsFlow
from mstpass.normalize.unstack import Part, Unstacker, Whole
from mstpass.regions.anchors import WIDE_OF_ANCHOR, anchors

aten = torch.ops.aten
_CHOSEN, _DROPPED = 0, 1  # the parts


def move_slices(joint: JointGraph) -> Rewritten:
    """Move the slices of wide values over tokens, in a copy of the graph.

    A slice stays where it is if it cannot be moved, for example because the other tokens of the
    logits are used as well.

    Returns:
        The copy and the names of the matmuls in it that became smaller; the graph itself if no
        slice was moved.
    """
    return repeated(joint, _next_sliced_matmul, _moved)


_Sliced = tuple[fx.Node, Spec, Choice]  # a matmul, its token dims, and which tokens alone are used


def _next_sliced_matmul(
    joint: JointGraph, tried: Container[str]
) -> tuple[list[str], _Sliced] | None:
    """The largest such matmul that was not tried; None if there is none."""
    for anchor, spec in joint.cached(anchors):
        found = () if anchor.name in tried else readings(joint, anchor, spec)
        windows = {choice_of(each.node, each.spec) for each in found if _takes_tokens(each)}
        window = windows.pop() if len(windows) == 1 else None
        if window is not None:
            return [anchor.name], (anchor, spec, window)
    return None


def _takes_tokens(reading: Reading) -> bool:
    """Whether a node is a slice or an index over tokens."""
    node, source = reading.node, reading.source
    takes_rows = row_index(node) is not None and source is node.args[0]
    return (node.target is aten.slice.Tensor or takes_rows) and taken_dim(node) in reading.spec


def _moved(joint: JointGraph, sliced: _Sliced) -> tuple[JointGraph, list[str]]:
    """The new graph, and the name of the smaller matmul in it.

    Raises:
        CannotTake: tokens outside of the window are used as well.
        UnknownSize: a symbolic size cannot be written.
    """
    (old, spec, choice), rewriting = sliced, Rewriting(joint)
    matmul = rewriting.joint.by_name[old.name]
    parts, wide_numel = _Chosen(choice=choice), WIDE_OF_ANCHOR * numel(matmul)
    flow = PartsFlow(rewriting.joint, matmul, wide_numel, spec, parts)
    if not flow.picks:
        raise CannotTake(matmul, "its token dims are not those of the slice")
    unstacker = Unstacker(rewriting, flow, _Window)
    new, _ = unstacker.unstack()
    moved = unstacker.each[_CHOSEN].known.get((matmul, spec))
    if moved is None or any(n is matmul for n in new.nodes):
        raise CannotTake(matmul, "the tokens that a slice drops are used as well")
    return new, [moved.name]


@dataclasses.dataclass(frozen=True)
class _Chosen(Parts):
    """The tokens of a choice, and those that it drops."""

    choice: Choice | None = None
    rest: ClassVar[frozenset[int]] = frozenset({_DROPPED})

    @property
    def axis(self) -> Axis:
        return TOKEN_AXIS

    def _part_at(self, node: fx.Node, held: Spec) -> int | None:
        return _CHOSEN if choice_of(node, held) == self.choice else None


class _Window(Part):
    """The tokens of a choice."""

    def __init__(self, rewriting: Rewriting, flow: PartsFlow, number: int, whole: Whole):
        first: Any = next(iter(flow.picks))
        source, self.rows = first.args[0], row_index(first)
        spec, (taken, every) = flow.held[source], (n.meta["val"].shape for n in (first, source))
        super().__init__(rewriting, flow, number, whole, [taken[d] for d in spec])
        self.every, self.dim = [every[d] for d in spec], spec.index(taken_dim(first))
        if self.rows is None:
            self.bounds = [argument(first, name) for name in ("start", "end")]
        else:
            for reader in self.rows.users:
                self.sizes.learn(reader)
            with rewriting.graph.inserting_before(first):
                self.sizes.learn_dim(self.rows, 0)
        # What equals a maximum is looked for in small values, so it is the maximum of these.
        self.compared = set[fx.Node]().union(*map(compared, rewriting.joint.nodes))

    def is_computed(self, node: fx.Node) -> bool:
        """No node may need wide values for all tokens."""
        if self.rows is not None and ops.is_cheap_view(node):  # to select copies
            return True
        is_item = node.target is operator.getitem  # the small results of an op exist
        return node in self.compared or (self.flow.is_wide(node) and not is_item)

    def taken(self, node: fx.Node, spec: Spec) -> fx.Node:
        shape = node.meta["val"].shape
        held, window = [generic(shape[d]) for d in spec], [*map(generic, self.every)]
        merged = 1 in (len(spec), len(window)) and math.prod(held) == math.prod(window)
        if not merged and held != window:
            raise CannotTake(node, "its token dims differ from those of the slice")
        every, dim = self.on_grid(node, node, spec, self.every), spec[0] + self.dim
        if self.rows is None:
            return self.builder.call(aten.slice.Tensor, every, dim, *self.bounds)
        return self.builder.call(aten.index.Tensor, every, [*[None] * dim, self.rows])

    def together(self, node: fx.Node, held: Spec, each: Sequence[Part]) -> fx.Node:
        """The values of the tokens among zeros."""
        if not self.flow.zero_in(_DROPPED, [node]):
            raise CannotTake(node, "the tokens that a slice drops are used as well")
        dim, small = held[0] + self.dim, self.value(node, held)
        source = self.on_grid(small, node, held, self.grid)
        shape = self.sizes.arguments(grid_shape(node, held, self.every))
        zeros = self.builder.filled(shape, 0, node.meta["val"])
        if self.rows is None:
            return self.builder.call(aten.slice_scatter.default, zeros, source, dim, *self.bounds)
        indices, adds = [*[None] * dim, self.rows], not are_distinct(self.rows)
        return self.builder.call(aten.index_put.default, zeros, indices, source, adds)
