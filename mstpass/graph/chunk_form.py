"""One node for one chunk of tokens or heads: the same op on operands in chunk form.

The *chunk form* of a value has the chunk's tokens in the place of all tokens (tokens.py), or its
heads in the place of all heads. Besides
the operands only the sizes among the arguments change; the op table says where they stand. The
shape of the new node is checked against the chunk form of the old one, so a wrong token rule is
refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import REPORT
from mstpass.graph.axes import TOKEN_AXIS, Axis
from mstpass.graph.builder import Builder, SizeNodes
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec

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
    olds, news = tensors_of(node.meta["val"]), tensors_of(built.meta["val"])
    shapes = axis.chunk_shapes(node, spec, chunk_tokens)
    for old, new, expected in zip(olds, news, shapes, strict=True):
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
