"""The axis along which a loop cuts values: tokens, heads, rows of queries, features, or rows of the
batch.

Terms:
    *spec*: where a value holds what the axis runs over: its token dims (tokens.py), or its
        ``HeadDim`` (heads.py). ``WHOLE``, the empty spec, marks a value that every chunk reads in
        full, and None, where a spec is optional, a sum over chunks.
    *rows*: the layout in which a loop slices and stacks a value: ``[N, rest]``, with one row for
        each token or head.

All axes answer the same questions, so that one writer of loops serves them.

``add_chunk``: one node for one chunk of tokens or heads is the same op on operands in chunk form.
The *chunk form* of a value has the chunk's tokens in the place of all tokens (tokens.py), or its
heads in the place of all heads. Besides the operands only the sizes among the arguments change; the
op table says where they stand. The shape of the new node is checked against the chunk form of the
old one, so a wrong token rule is refused here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import REPORT
from mstpass.graph.attention import (
    OTHER_RESULT,
    OTHER_ROWS,
    held_by_item,
    is_attention,
    is_attention_item,
    operand_rows,
)
from mstpass.graph.batch_axis import BatchAxis
from mstpass.graph.builder import Builder, SizeNodes
from mstpass.graph.heads import HeadAxis, Rows
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Reduced, Refusal, Spec, chunk_shape

TOKENS, HEADS, QUERIES, FEATURES = "tokens", "heads", "queries", "features"
BATCH = "batch"
ALONG_A_DIM = (HEADS, FEATURES, BATCH)  # each value holds them in one dim (heads.HeadDim)


class TokenAxis:
    """Tokens, in one dim or several: what regions and loops need to know of an axis."""

    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        """The spec of a node's result if one of its operands has ``spec``."""
        return ops.result_spec(node, operand, spec)

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        """The specs that a node's operands must have for its result to have ``spec``."""
        return ops.operand_specs(node, spec)

    def sum_operands(self, node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
        """The specs of the operands of a node that sums ``operand`` over the axis."""
        return ops.sum_operands(node, operand, spec)

    def size_operands(self, node: fx.Node) -> list[fx.Node]:
        """The symbolic sizes that one chunk of a node is computed with."""
        return ops.size_operands(node)

    def chunk_shape(self, node: fx.Node, spec: Spec, length: Any) -> list[Any]:
        """The shape of one chunk of a node's tensor; it holds ``length`` tokens or heads."""
        return chunk_shape(node.meta["val"].shape, spec, length)

    def shape_argument(self, node: fx.Node, spec: Spec, given: Any, length: Any) -> list[Any]:
        """The sizes in an op's arguments, ``given`` for the whole value, for one chunk of it."""
        # The old sizes are left out, for their nodes have no chunk.
        return chunk_shape(next(tensors_of(node.meta["val"])).shape, spec, length)

    def arguments(
        self, node: fx.Node, args: tuple[Any, ...], spec: Spec, length: Any
    ) -> tuple[Any, ...]:
        """The arguments of an op for one chunk, but for operands and shapes."""
        return args

    def rows(self, shape: Sequence[Size], spec: Spec, length: Any = None) -> Rows:
        """The rows of a value of this shape; with ``length`` those of one chunk of it.

        Raises:
            UnknownSize: a symbolic size does not come apart.
        """
        rest = [d for d in range(len(shape)) if d not in spec]
        apart = list(shape) if length is None else chunk_shape(shape, spec, length)
        count = math.prod(shape[d] for d in spec) if length is None else length
        return Rows(apart, [*spec, *rest], [count, *(shape[d] for d in rest)])

    def stacked(
        self, shape: Sequence[Size], spec: Spec, length: Any = None
    ) -> tuple[list[Any], int]:
        """The shape in which a loop stacks a value, or one chunk of it, and the dim of its rows."""
        return self.rows(shape, spec, length).shape, 0

    def mask_shapes(self, shape: Sequence[Size], spec: Spec, length: int) -> list[list[Any]]:
        """Three shapes: a mask of a chunk's rows is viewed in the first one, expanded to the second
        and viewed in the third, to choose among the elements of a chunk of this shape."""
        return [[length], [length], chunk_shape([1] * len(shape), spec, length)]


@dataclasses.dataclass(frozen=True)
class QueryAxis(TokenAxis):
    """Tokens of attention's queries; keys and values are whole (attention.py)."""

    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        if is_attention(node):
            needs = operand_rows(node, spec)
            if isinstance(needs, Refusal):
                return needs
            return spec if needs.get(operand) == spec else Refusal(OTHER_ROWS)
        if is_attention_item(node):
            held = held_by_item(node)
            if held is None or not (held.is_sum or held.rows is not None):
                return Refusal(OTHER_RESULT)
            return SUM if held.is_sum else spec
        return super().result_spec(node, operand, spec)

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        if is_attention(node) or is_attention_item(node):
            return operand_rows(node, spec)
        return super().operand_specs(node, spec)


Axis = TokenAxis | HeadAxis
TOKEN_AXIS = TokenAxis()
QUERY_AXIS = QueryAxis()


def axis_of(name: str, count: int) -> Axis:
    """The axis of a plan, along which it has ``count`` tokens, heads or queries."""
    if name in ALONG_A_DIM:
        return BatchAxis(count) if name == BATCH else HeadAxis(count)
    return QUERY_AXIS if name == QUERIES else TOKEN_AXIS


# ---- one node for one chunk ----------------------------------------------------------------------
aten = torch.ops.aten

OperandChunk = Callable[[fx.Node, Spec], fx.Node]  # (operand, its spec) -> the node of its chunk


def chunk_call(
    node: fx.Node,
    spec: Spec,
    chunk_tokens: Size,
    operand_chunk: OperandChunk,
    rows: int | fx.Node | None = None,
    axis: Axis = TOKEN_AXIS,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The target, the arguments and the keyword arguments that compute one chunk of ``node``.

    Args:
        spec: the token dims of the node's value.
        chunk_tokens: the length of a chunk.
        operand_chunk: gives the chunk of an operand; a size comes back as it is.
        rows: the argument that holds the length, if it is known at run time only.
        axis: what the chunks divide.

    Raises:
        CannotTake: the op has no rule for this spec.
    """
    needs = axis.operand_specs(node, spec)
    if isinstance(needs, Refusal):
        raise CannotTake(node, needs.reason)
    target: Any = node.target
    args = axis.arguments(node, node.args, spec, chunk_tokens)
    shape: list[Any] | None = None
    position = ops.row(node).shape_arg
    if position is not None and spec:
        shape = axis.shape_argument(node, spec, args[position], chunk_tokens)
        if rows is not None:
            shape[spec[-1]] = rows
        args = (*args[:position], None, *args[position + 1 :])
    if ops.is_view_by_shape(node):
        target = aten.reshape.default
    mapped: Any = fx.map_arg((args, node.kwargs), lambda n: operand_chunk(n, needs.get(n, WHOLE)))
    args, kwargs = mapped
    if shape is not None and position is not None:
        sizes = fx.map_arg(shape, lambda n: n if n is rows else operand_chunk(n, WHOLE))
        args = (*args[:position], sizes, *args[position + 1 :])
    return target, args, kwargs


def check_chunk(
    node: fx.Node, spec: Spec, chunk_tokens: Size, built: fx.Node, axis: Axis = TOKEN_AXIS
) -> None:
    """Check that ``built`` has the chunk form of the node's value.

    Raises:
        CannotTake: it has another shape or dtype.
    """
    old, new = value_of(node), built.meta["val"]
    if old is None:  # of several results, each is checked where it is read
        return
    expected = axis.chunk_shape(node, spec, chunk_tokens)
    if not same_shape(new.shape, expected) or new.dtype != old.dtype:
        raise CannotTake(
            node,
            REPORT(
                f"its chunk has shape {list(new.shape)} and {new.dtype}, "
                f"expected {expected} and {old.dtype}"
            ),
        )


def add_chunk(
    builder: Builder,
    node: fx.Node,
    spec: Spec,
    chunk_tokens: Size,
    operand_chunk: OperandChunk,
    sizes: SizeNodes,
    axis: Axis = TOKEN_AXIS,
) -> fx.Node:
    """Add the node that computes one chunk of ``node`` to the builder's graph, and check it.

    Args:
        sizes: writes the symbolic sizes, that of the chunk and those of the node's other dims.

    The other arguments, and ``CannotTake``, are those of ``chunk_call``.

    Raises:
        UnknownSize: a symbolic size cannot be written.
    """

    def written(size: Any) -> Any:
        return sizes.arguments([size])[0] if isinstance(size, torch.SymInt) else size

    rows = written(chunk_tokens) if axis is TOKEN_AXIS else None
    target, args, kwargs = chunk_call(node, spec, chunk_tokens, operand_chunk, rows, axis)
    args, kwargs = fx.node.map_aggregate((args, kwargs), written)
    built = builder.call(target, *args, **kwargs)
    check_chunk(node, spec, chunk_tokens, built, axis)
    return built
