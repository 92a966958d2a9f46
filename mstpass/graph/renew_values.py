"""Fake values are computed again where a rewrite has changed the strides of what a node reads.

An op that takes the place of another may return the same elements in another order of memory, as
another kernel of attention or a loop over heads does. The recorded strides of all that is computed
from it are then wrong, and later passes, and Inductor, read them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mstpass.graph.builder import Builder
from mstpass.graph.chunk_form import VIEWS_BY_SHAPE
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import depends_on_data, generic_shape, generic_stride


class CannotRenew(Exception):
    """An op cannot read the new strides; the message says which."""


def renew_values(builder: Builder, changed: Iterable[fx.Node]) -> set[fx.Node]:
    """Compute the values behind nodes whose strides have changed, in place.

    Returns:
        The nodes with other strides than before, the given ones among them.

    Raises:
        CannotRenew: an op cannot read them.
    """
    found = set(changed)
    for node in builder.graph.nodes if found else ():
        if node in found or node.op != "call_function" or found.isdisjoint(node.all_input_nodes):
            continue
        if renew_value(builder, node):
            found.add(node)
    return found


def renew_value(builder: Builder, node: fx.Node) -> bool:
    """Compute a node's value again. Whether its strides, shape or dtype changed.

    A view by shape copies where the strides allow no view, as Inductor has it.

    Raises:
        CannotRenew: the op cannot read its operands.
    """
    if any(map(depends_on_data, tensors_of(node.meta.get("val")))):
        return False  # a new value would have a new size
    if node.target in VIEWS_BY_SHAPE:
        node.target = torch.ops.aten.reshape.default
    before = layout_of(node)
    try:
        builder.compute_value(node)
    except Exception as error:
        raise CannotRenew(f"{node.name} cannot read other strides: {error}") from error
    return layout_of(node) != before


def layout_of(node: fx.Node) -> list[object]:
    """The shapes, strides and dtypes of a node's tensors; the strides of dims of one element do not
    count."""
    return [(generic_shape(t), _strides(t), t.dtype) for t in tensors_of(node.meta.get("val"))]


def _strides(tensor: torch.Tensor) -> list[object]:
    pairs = zip(generic_shape(tensor), generic_stride(tensor), strict=True)
    return [None if size == 1 else stride for size, stride in pairs]
