"""The axis along which a loop's chunks cut values: tokens, heads, rows of queries, or features.

Terms:
    *spec*: where a value holds what the axis runs over: its token dims (tokens.py), or its
        ``HeadDim`` (heads.py). ``WHOLE``, the empty spec, marks a value that every chunk reads in
        full, and None, where a spec is optional, a sum over chunks.
    *rows*: the layout in which a loop slices and stacks a value: ``[N, rest]``, with one row for
        each token or head.

All axes answer the same questions, so that one writer of loops serves them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch import fx

from mstpass.graph import heads, intervals, ops, query_rows
from mstpass.graph.builder import UnknownSize
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import Size, generic, hint, is_size
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, Reduced, Refusal, Spec, chunk_shape

TOKENS, HEADS, QUERIES, FEATURES = "tokens", "heads", "queries", "features"
ALONG_A_DIM = (HEADS, FEATURES)  # each value holds them in one dim (heads.HeadDim)


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


class Axis(Protocol):
    """What regions and loops need to know of an axis."""

    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        """The spec of a node's result if one of its operands has ``spec``."""

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        """The specs that a node's operands must have for its result to have ``spec``."""

    def sum_operands(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        """The specs of the operands of a node that sums ``operand`` over the axis."""

    def size_operands(self, node: fx.Node) -> list[fx.Node]:
        """The symbolic sizes that one chunk of a node is computed with."""

    def chunk_shapes(self, node: fx.Node, spec: Spec, length: Any) -> list[list[Any]]:
        """The shape of one chunk of each tensor of a node; it holds ``length`` tokens or heads."""

    def shape_argument(self, node: fx.Node, spec: Spec, given: Any, length: Any) -> list[Any]:
        """The sizes in an op's arguments, ``given`` for the whole value, for one chunk of it."""

    def arguments(
        self, node: fx.Node, args: tuple[Any, ...], spec: Spec, length: Any
    ) -> tuple[Any, ...]:
        """The arguments of an op for one chunk, but for operands and shapes."""

    def rows(self, shape: Sequence[Size], spec: Spec, length: Any = None) -> Rows:
        """The rows of a value of this shape; with ``length`` those of one chunk of it.

        Raises:
            UnknownSize: a symbolic size does not come apart.
        """

    def stacked(
        self, shape: Sequence[Size], spec: Spec, length: Any = None
    ) -> tuple[list[Any], int]:
        """The shape in which a loop stacks a value, or one chunk of it, and the dim of its rows."""

    def mask_shapes(self, shape: Sequence[Size], spec: Spec, length: int) -> list[list[Any]]:
        """Three shapes: a mask of a chunk's rows is viewed in the first one, expanded to the second
        and viewed in the third, to choose among the elements of a chunk of this shape."""


class TokenAxis:
    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        return ops.result_spec(node, operand, spec)

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        return ops.operand_specs(node, spec)

    def sum_operands(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        return ops.sum_operands(node, operand, spec)

    def size_operands(self, node: fx.Node) -> list[fx.Node]:
        return ops.size_operands(node)

    def chunk_shapes(self, node: fx.Node, spec: Spec, length: Any) -> list[list[Any]]:
        return [chunk_shape(v.shape, spec, length) for v in tensors_of(node.meta["val"])]

    def shape_argument(self, node: fx.Node, spec: Spec, given: Any, length: Any) -> list[Any]:
        # The old sizes are left out, for their nodes have no chunk.
        return chunk_shape(next(tensors_of(node.meta["val"])).shape, spec, length)

    def arguments(
        self, node: fx.Node, args: tuple[Any, ...], spec: Spec, length: Any
    ) -> tuple[Any, ...]:
        return args

    def rows(self, shape: Sequence[Size], spec: Spec, length: Any = None) -> Rows:
        rest = [d for d in range(len(shape)) if d not in spec]
        apart = list(shape) if length is None else chunk_shape(shape, spec, length)
        count = math.prod(shape[d] for d in spec) if length is None else length
        return Rows(apart, [*spec, *rest], [count, *(shape[d] for d in rest)])

    def stacked(
        self, shape: Sequence[Size], spec: Spec, length: Any = None
    ) -> tuple[list[Any], int]:
        return self.rows(shape, spec, length).shape, 0

    def mask_shapes(self, shape: Sequence[Size], spec: Spec, length: int) -> list[list[Any]]:
        return [[length], [length], chunk_shape([1] * len(shape), spec, length)]


@dataclasses.dataclass(frozen=True)
class HeadAxis:
    num_heads: int

    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        return heads.result_heads(node, operand, HeadDim(*spec), self.num_heads)

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        if not spec:
            return ops.operand_specs(node, spec)
        return heads.operand_heads(node, HeadDim(*spec), self.num_heads)

    def sum_operands(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        return heads.summed_heads(node, operand, HeadDim(*spec))

    def size_operands(self, node: fx.Node) -> list[fx.Node]:
        return [operand for operand in node.all_input_nodes if is_size(operand)]

    def chunk_shapes(self, node: fx.Node, spec: Spec, length: Any) -> list[list[Any]]:
        shapes: list[list[Any]] = [list(v.shape) for v in tensors_of(node.meta["val"])]
        for position, shape in enumerate(shapes):
            if spec and heads.result_has_heads(node, position):
                dim = heads.result_dim(node, position, spec[0])
                if shape[dim] != 1:  # of a single key-value head
                    shape[dim] = shape[dim] // self.num_heads * length
        return shapes

    def shape_argument(self, node: fx.Node, spec: Spec, given: Any, length: Any) -> list[Any]:
        (shape,) = self.chunk_shapes(node, spec, length)
        return [size if d == spec[0] else given[d] for d, size in enumerate(shape)]

    def arguments(
        self, node: fx.Node, args: tuple[Any, ...], spec: Spec, length: Any
    ) -> tuple[Any, ...]:
        return intervals.chunk_arguments(node, args, spec, self.num_heads, length) if spec else args

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


@dataclasses.dataclass(frozen=True)
class QueryAxis(TokenAxis):
    """Tokens of attention's queries; keys and values are whole (query_rows.py)."""

    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        if heads.is_attention(node):
            needs = query_rows.operand_rows(node, spec)
            if isinstance(needs, Refusal):
                return needs
            return spec if needs.get(operand) == spec else Refusal(query_rows.OTHER_ROWS)
        if heads.is_attention_item(node):
            return SUM if query_rows.is_summed(node) else spec
        return super().result_spec(node, operand, spec)

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        if heads.is_attention(node) or heads.is_attention_item(node):
            return query_rows.operand_rows(node, spec)
        return super().operand_specs(node, spec)

    def sum_operands(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        if heads.is_attention_item(node):
            return {operand: spec}
        return super().sum_operands(node, operand, spec)

    def chunk_shapes(self, node: fx.Node, spec: Spec, length: Any) -> list[list[Any]]:
        if not heads.is_attention(node):
            return super().chunk_shapes(node, spec, length)
        shapes = [v.shape for v in tensors_of(node.meta["val"])]
        return [
            chunk_shape(shape, spec, length)
            if query_rows.result_by_row(node, position)
            else list(shape)
            for position, shape in enumerate(shapes)
        ]


TOKEN_AXIS: Axis = TokenAxis()
QUERY_AXIS: Axis = QueryAxis()


def axis_of(name: str, count: int) -> Axis:
    """The axis of a plan, along which it has ``count`` tokens, heads or queries."""
    if name in ALONG_A_DIM:
        return HeadAxis(count)
    return QUERY_AXIS if name == QUERIES else TOKEN_AXIS
