"""Redo a node for other tokens: the same op on operands in chunk form.

Only sizes in the arguments change (the op table says where). The new shape is checked against the
chunk form of the old one, so that a wrong rule cannot pass unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.builder import Builder
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.tokens import WHOLE, CannotTake, Refusal, Spec, chunk_shape

aten = torch.ops.aten
_VIEWS_BY_SHAPE = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def needs_of(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    """What a node needs of its operands; raises ``CannotTake`` where it cannot have the spec."""
    needs = op_table.operand_specs(node, spec)
    if isinstance(needs, Refusal):
        raise CannotTake(node, needs.reason)
    return needs


def chunk_call(
    node: fx.Node,
    spec: Spec,
    chunk_tokens: Size,
    operand: Callable[[fx.Node, Spec], fx.Node],
    rows: int | fx.Node | None = None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keywords of the node's chunk.

    Args:
        operand: gives an operand's chunk, and sizes as they are.
        rows: holds the chunk's length where it is known at run time only.
    """
    row = op_table.lookup(node)
    if isinstance(row, Refusal):
        raise CannotTake(node, row.reason)
    needs = needs_of(node, spec)
    target: Any = node.target
    args: tuple[Any, ...] = node.args
    shape: list[Any] | None = None
    position = row.shape_arg
    if position is not None and spec:
        shape = [*chunk_shape(next(tensors_of(node.meta["val"])).shape, spec, chunk_tokens)]
        if rows is not None:
            shape[spec[-1]] = rows
        args = (*args[:position], None, *args[position + 1 :])  # its old nodes are of no use
    if target in _VIEWS_BY_SHAPE:
        target = aten.reshape.default
    mapped: Any = fx.map_arg((args, node.kwargs), lambda n: operand(n, needs.get(n, WHOLE)))
    args, kwargs = mapped
    if shape is not None and position is not None:
        args = (*args[:position], shape, *args[position + 1 :])
    return target, args, kwargs


def check_chunk(node: fx.Node, spec: Spec, chunk_tokens: Size, built: fx.Node) -> None:
    """Raise ``CannotTake`` unless ``built`` has the chunk form of the node's value."""
    olds, news = tensors_of(node.meta["val"]), tensors_of(built.meta["val"])
    for old, new in zip(olds, news, strict=True):
        expected = chunk_shape(old.shape, spec, chunk_tokens)
        if not same_shape(new.shape, expected) or new.dtype != old.dtype:
            raise CannotTake(
                node, f"its chunk has shape {list(new.shape)}, {expected} was expected"
            )


def replay(
    builder: Builder,
    node: fx.Node,
    spec: Spec,
    chunk_tokens: Size,
    operand: Callable[[fx.Node, Spec], fx.Node],
    rows: int | fx.Node | None = None,
) -> fx.Node:
    """The node's chunk, added to the builder's graph."""
    target, args, kwargs = chunk_call(node, spec, chunk_tokens, operand, rows)
    built = builder.call(target, *args, **kwargs)
    check_chunk(node, spec, chunk_tokens, built)
    return built
