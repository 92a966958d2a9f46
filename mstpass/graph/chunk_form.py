"""One node for one chunk of tokens: the same op on operands in chunk form.

The *chunk form* of a value has the chunk's tokens in the place of all tokens (tokens.py). Besides
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
from mstpass.graph.builder import Builder
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec, chunk_shape

aten = torch.ops.aten
_VIEWS_BY_SHAPE = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

OperandChunk = Callable[[fx.Node, Spec], fx.Node]  # (operand, its spec) -> the node of its chunk


def chunk_call(
    node: fx.Node,
    spec: Spec,
    chunk_tokens: Size,
    operand_chunk: OperandChunk,
    rows: int | fx.Node | None = None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The target, the arguments and the keyword arguments that compute one chunk of ``node``.

    Args:
        spec: the token dims of the node's value.
        chunk_tokens: the length of a chunk.
        operand_chunk: gives the chunk of an operand; a size comes back as it is.
        rows: the argument that holds the length, if it is known at run time only.

    Raises:
        CannotTake: the op has no token rule for this spec.
    """
    row = ops.lookup(node)
    if isinstance(row, Refusal):
        raise CannotTake(node, row.reason)
    needs = ops.operand_specs(node, spec)
    if isinstance(needs, Refusal):
        raise CannotTake(node, needs.reason)
    target: Any = node.target
    args: tuple[Any, ...] = node.args
    shape: list[Any] | None = None
    position = row.shape_arg
    if position is not None and spec:
        shape = [*chunk_shape(next(tensors_of(node.meta["val"])).shape, spec, chunk_tokens)]
        if rows is not None:
            shape[spec[-1]] = rows
        # The old sizes are left out, for their nodes have no chunk.
        args = (*args[:position], None, *args[position + 1 :])
    if target in _VIEWS_BY_SHAPE:
        target = aten.reshape.default
    mapped: Any = fx.map_arg((args, node.kwargs), lambda n: operand_chunk(n, needs.get(n, WHOLE)))
    args, kwargs = mapped
    if shape is not None and position is not None:
        args = (*args[:position], shape, *args[position + 1 :])
    return target, args, kwargs


def check_chunk(node: fx.Node, spec: Spec, chunk_tokens: Size, built: fx.Node) -> None:
    """Check that ``built`` has the chunk form of the node's value.

    Raises:
        CannotTake: it has another shape or dtype.
    """
    olds, news = tensors_of(node.meta["val"]), tensors_of(built.meta["val"])
    for old, new in zip(olds, news, strict=True):
        expected = chunk_shape(old.shape, spec, chunk_tokens)
        if not same_shape(new.shape, expected) or new.dtype != old.dtype:
            raise CannotTake(
                node,
                f"its chunk has shape {list(new.shape)} and {new.dtype}, "
                f"expected {expected} and {old.dtype}",
            )


def add_chunk(
    builder: Builder,
    node: fx.Node,
    spec: Spec,
    chunk_tokens: Size,
    operand_chunk: OperandChunk,
    rows: int | fx.Node | None = None,
) -> fx.Node:
    """Add the node that computes one chunk of ``node`` to the builder's graph, and check it.

    The arguments are those of ``chunk_call``.
    """
    target, args, kwargs = chunk_call(node, spec, chunk_tokens, operand_chunk, rows)
    built = builder.call(target, *args, **kwargs)
    check_chunk(node, spec, chunk_tokens, built)
    return built
