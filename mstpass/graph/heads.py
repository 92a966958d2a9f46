"""Heads of attention, and features: how a dim that holds what a loop cuts passes through each op.

Terms:
    *head-parallel*: an op is head-parallel if each head of its result depends on the same head of
        its operands, and on no other head.
    *HeadDim*: where a value holds its heads. ``HeadDim(dim, inner)``: along ``dim`` each of the G
        heads has ``inner`` elements in a row. ``[B, N, G * d]`` has ``HeadDim(2, d)``, and after a
        view ``[B, N, G, d]`` it has ``HeadDim(2, 1)``. A dim may hold several rounds of heads:
        ``[B * G, N, d]`` has ``HeadDim(0, 1)``. ``WHOLE`` marks a value without heads, such as the
        input of the projections: every group of heads reads it in full.
    *G*: the number of heads that a loop can tell apart. Of grouped queries, G is the number of
        key-value heads, and a head of the queries counts as a part of its group. If there is a
        single key-value head, every group of query heads reads it whole, and its gradients are
        sums over the groups.

A head is to a group of heads what a token is to a chunk of tokens: along one dim a value is cut
into parts that are computed apart. So the rules are the token rules (token_rules/), applied to one
dim, but for three kinds of ops:

- views may split and merge the dim, as long as the heads stay apart (``through_view``)
- attention is no barrier: the products and the softmax of a head are its own (attention.py)
- slices and concatenations along the dim keep heads apart where they take or put whole rounds,
  such as the two of a gate and an up projection in one product::

      slice(x, dim, 0, l)           [N, 2 * l] -> [N, l]
      cat([dgate, dup], dim)        [N, l], [N, l] -> [N, 2 * l]
      slice_scatter(zeros, dgate, dim, 0, l)

A value may also be a *sum* over heads (``SUM``): the output projection contracts them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import ALIKE_HEADS, DIVIDING_HEADS, HEADS_APART, NO_TRAINED_SCORES
from mstpass.graph.attention import (
    DROPOUT,
    Held,
    depends_on_head,
    gradients_of_buffers,
    heads_dim,
    held_by_item,
    is_attention,
    is_attention_item,
    is_flex,
    operands_of,
)
from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.sizes import Size, generic, hint, is_size
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, shape_of, tensor_inputs
from mstpass.graph.tokens import SUM, WHOLE, Reduced, Refusal, Spec, group_of

aten = torch.ops.aten
_SLICES = (aten.slice.Tensor, aten.slice_scatter.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_PARTS = (aten.cat.default, *_SLICES, *_SPLITS)

MIXED = HEADS_APART("a view mixes heads with other dims")
PARTS = HEADS_APART("a part of a dim does not hold whole rounds of heads")
STATE = HEADS_APART("the state of attention's random generator has no heads")
FEW_KEYS = DIVIDING_HEADS("attention's key-value heads do not divide into the groups")
OTHER_SCORES = ALIKE_HEADS("FlexAttention's scores or masks depend on the head")
BUFFERS = NO_TRAINED_SCORES("FlexAttention returns gradients of what its scores are changed by")


class HeadDim(NamedTuple):
    """The dim along which a value holds its heads, and the elements of one head in a row there."""

    dim: int
    inner: int = 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """How a value becomes rows: a view as ``apart``, its dims in ``order``, a view as ``shape``."""

    apart: list[Any]
    order: list[int]
    shape: list[Any]

    @property
    def ordered(self) -> list[Any]:
        return [self.apart[d] for d in self.order]

    @property
    def inverse(self) -> list[int]:
        return [self.order.index(d) for d in range(len(self.order))]


@dataclasses.dataclass(frozen=True)
class HeadAxis:
    """Heads or features, of which each value has ``num_heads``; methods as of ``TokenAxis``."""

    num_heads: int

    # ---- rules ---------------------------------------------------------------------------------
    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        held = HeadDim(*spec)
        if is_attention(node):
            needs = self.attention_operands(node)
            if isinstance(needs, Refusal):
                return needs
            if needs[operand] != held:
                return Refusal(HEADS_APART("attention needs its heads in another dim"))
            return self._heads_in(node, self.dim_in(node))
        if is_attention_item(node):
            return self._item(node)
        if ops.is_reshape(node):
            return through_view(shape_of(operand), shape_of(node), held, self.num_heads)
        if works_along(node, held.dim):
            needs = self._part_specs(node, held)
            return needs if isinstance(needs, Refusal) else held
        result = ops.result_spec(node, operand, (held.dim,))
        if isinstance(result, Reduced):
            return result
        if isinstance(result, Refusal):
            return _in_terms_of_heads(result)
        if len(result) != 1:
            return Refusal(HEADS_APART(f"{node.target} has no dim of heads"))
        return HeadDim(result[0], held.inner)

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        if not spec:
            return ops.operand_specs(node, spec)
        held = HeadDim(*spec)
        if is_attention(node):
            return self.attention_operands(node)
        if is_attention_item(node):
            (source,) = node.all_input_nodes
            if held_by_item(node) is None:
                return Refusal(STATE)
            return {source: self._heads_in(source, self.dim_in(source))}
        if ops.is_reshape(node):
            source = node.all_input_nodes[0]
            result = through_view(shape_of(node), shape_of(source), held, self.num_heads)
            return result if isinstance(result, Refusal) else {source: result}
        if works_along(node, held.dim):
            return self._part_specs(node, held)
        needs = ops.operand_specs(node, (held.dim,))
        if isinstance(needs, Refusal):
            return _in_terms_of_heads(needs)
        size = shape_of(node)[held.dim]
        for operand, found in needs.items():
            if found and shape_of(operand)[found[0]] != size:
                return Refusal(HEADS_APART(f"{operand.name} has other sizes along the heads"))
        return _with_inner(needs, held)

    def sum_operands(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        held = HeadDim(*spec)
        return _with_inner(ops.sum_operands(node, operand, (held.dim,)), held)

    # ---- attention -----------------------------------------------------------------------------
    def dim_of(self, held: Held) -> int | None:
        """The dim of an operand or a result of attention that holds heads; None if none does."""
        return held.heads

    def dim_in(self, attention: fx.Node) -> int:
        """That of the result of an attention, or of the gradient of its queries."""
        return heads_dim(attention)

    def attention_operands(self, node: fx.Node) -> OperandSpecs | Refusal:
        if is_flex(node):
            if depends_on_head(node):
                return Refusal(OTHER_SCORES)
            if gradients_of_buffers(node):
                return Refusal(BUFFERS)
        elif argument(node, "dropout_p") != 0:
            return Refusal(DROPOUT)
        needs: OperandSpecs = dict.fromkeys(tensor_inputs(node), WHOLE)
        for operand, held in operands_of(node).items():
            dim = self.dim_of(held)
            if dim is None or shape_of(operand)[dim] == 1:  # the key-value head of all queries
                continue
            if shape_of(operand)[dim] % self.num_heads:
                return Refusal(FEW_KEYS)
            needs[operand] = self._heads_in(operand, dim)
        return needs

    def _item(self, item: fx.Node) -> HeadDim | Reduced | Refusal:
        held = held_by_item(item)
        if held is None or (dim := self.dim_of(held)) is None:
            return Refusal(STATE)
        return SUM if shape_of(item)[dim] == 1 else self._heads_in(item, dim)

    def _heads_in(self, node: fx.Node, dim: int) -> HeadDim:
        return HeadDim(dim, shape_of(node)[dim] // self.num_heads)

    # ---- slices and concatenations -------------------------------------------------------------
    def _part_specs(self, node: fx.Node, held: HeadDim) -> OperandSpecs | Refusal:
        """Operands and result have the heads in one dim, with as many elements in a row."""
        strided = node.target in _SLICES and argument(node, "step") != 1
        whole = self.num_heads * held.inner
        if strided or any(size % whole for size in part_sizes(node, held.dim)):
            return Refusal(PARTS)
        return dict.fromkeys(tensor_inputs(node), held)

    def arguments(
        self, node: fx.Node, args: tuple[Any, ...], spec: Spec, length: Any
    ) -> tuple[Any, ...]:
        if not spec or node.target is aten.cat.default or not works_along(node, spec[0]):
            return args
        dim, count = spec[0], self.num_heads
        if node.target in _SPLITS:
            sizes = [value.shape[dim] // count * length for value in tensors_of(node.meta["val"])]
            return (
                args[0],
                sizes if node.target is aten.split_with_sizes.default else sizes[0],
                dim,
            )
        start, stop = (bound // count * length for bound in _ends(node))
        operands = args[: len(tensor_inputs(node))]
        return (*operands, dim, start, stop)

    # ---- layouts -------------------------------------------------------------------------------
    def size_operands(self, node: fx.Node) -> list[fx.Node]:
        return [operand for operand in node.all_input_nodes if is_size(operand)]

    def chunk_shape(self, node: fx.Node, spec: Spec, length: Any) -> list[Any]:
        shape = list(node.meta["val"].shape)
        if spec:
            shape[spec[0]] = shape[spec[0]] // self.num_heads * length
        return shape

    def shape_argument(self, node: fx.Node, spec: Spec, given: Any, length: Any) -> list[Any]:
        shape = self.chunk_shape(node, spec, length)
        return [size if d == spec[0] else given[d] for d, size in enumerate(shape)]

    def rows(self, shape: Sequence[Size], spec: Spec, length: Any = None) -> Rows:
        dim, generic_inner = spec
        rounds, inner = _rounds_and_inner(shape[dim], generic_inner, self.num_heads)
        before = [*shape[:dim], *([] if generic(rounds) == 1 else [rounds])]
        after = [*([] if generic_inner == 1 else [inner]), *shape[dim + 1 :]]
        count = self.num_heads if length is None else length
        rest = [d for d in range(len(before) + 1 + len(after)) if d != len(before)]
        order = [len(before), *rest]
        return Rows([*before, count, *after], order, [count, *before, *after])

    def stacked(
        self, shape: Sequence[Size], spec: Spec, length: Any = None
    ) -> tuple[list[Any], int]:
        rows = self.rows(shape, spec, length)
        return rows.apart, rows.order[0]  # no copy puts the heads back in their place

    def mask_shapes(self, shape: Sequence[Size], spec: Spec, length: int) -> list[list[Any]]:
        dim, inner = spec
        rounds = shape[dim] // (length * inner)
        whole: list[Any] = [1] * len(shape)
        whole[dim] = shape[dim]
        return [[1, length, 1], [rounds, length, inner], whole]


def _with_inner(needs: OperandSpecs, held: HeadDim) -> OperandSpecs:
    """The dims of operands with as many elements of a head in a row as the result has."""
    return {n: HeadDim(spec[0], held.inner) if spec else WHOLE for n, spec in needs.items()}


def _rounds_and_inner(size: Size, inner: int, num_heads: int) -> tuple[Size, Size]:
    """The rounds of heads in a dim of this size, and the elements of one head in a row.

    A ``HeadDim`` has ``inner`` at the generic point. Which of the two factors is symbolic is told
    by the sizes of the traced batch.

    Raises:
        UnknownSize: both are symbolic.
    """
    generic_rounds = generic(size) // (num_heads * inner)
    if hint(size) // (num_heads * inner) * num_heads * inner == hint(size):
        return size // (num_heads * inner), inner
    in_a_row = size // (num_heads * generic_rounds)
    if hint(in_a_row) * num_heads * generic_rounds == hint(size):
        return generic_rounds, in_a_row
    raise UnknownSize(f"the size {size} has symbolic factors before and after the heads")


def _in_terms_of_heads(refusal: Refusal) -> Refusal:
    """The reason of a token rule, which was asked about heads."""
    reason: str = refusal.reason
    for token, head in (("token-parallel", "head-parallel"), ("token dim", "dim of heads")):
        reason = reason.replace(token, head)
    if reason.startswith("no token rule"):
        return refusal
    return Refusal(HEADS_APART(reason.replace("tokens", "heads").replace("a token", "a head")))


def through_view(
    in_shape: Sequence[int], out_shape: Sequence[int], held: HeadDim, num_heads: int
) -> HeadDim | Refusal:
    """Where a value holds its heads after a view.

    In the smallest group of dims that holds the heads, in row-major order, the elements are
    ``[rounds, G, inner]``. The result has a dim of heads if one of its dims holds all of G::

        [N, G * d] -> [N, G, d]         (1, d) -> (1, 1)
        [B, G, r, N, d] -> [B, G * r, N, d]     (1, 1) -> (1, r)
    """
    ins, outs = group_of(in_shape, out_shape, held.dim)
    if not outs:
        return Refusal(MIXED)
    inner = held.inner * math.prod(in_shape[d] for d in ins if d > held.dim)
    after = 1
    for dim in reversed(outs):
        if inner % after == 0 and out_shape[dim] % (num_heads * (inner // after)) == 0:
            return HeadDim(dim, inner // after)
        after *= out_shape[dim]
    return Refusal(MIXED)


# ---- parts of a dim ------------------------------------------------------------------------------
def works_along(node: fx.Node, dim: int) -> bool:
    """Whether the node takes or puts parts of this dim of its result."""
    return node.target in _PARTS and dim == argument(node, "dim") % len(shape_of(node))


def part_sizes(node: fx.Node, dim: int) -> list[int]:
    """The sizes of the parts that the node takes or puts along the dim; of other nodes none."""
    if not works_along(node, dim):
        return []
    values = [*tensors_of(node.meta["val"]), *map(value_of, tensor_inputs(node))]
    sizes = [generic(value.shape[dim]) for value in values if value is not None]
    return [*sizes, *(_ends(node) if node.target in _SLICES else [])]


def _ends(node: fx.Node) -> tuple[int, int]:
    rows = slice_rows(node)
    return rows.start, rows.stop


def slice_rows(node: fx.Node) -> range:
    """The numbers of the rows that a slice takes or puts, at the generic point."""
    dim, value = argument(node, "dim"), value_of(tensor_inputs(node)[0])
    assert value is not None, "the op gives one tensor"
    given = (_bound(argument(node, name)) for name in ("start", "end", "step"))
    return range(*slice(*given).indices(generic(value.shape[dim])))


def _bound(argument: Any) -> int | None:
    """A bound of a slice, at the generic point; None if none is given."""
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    return None if value is None else generic(value)
