"""The layout in which a loop reads an operand: ``[N, rest]``, tokens first.

If the operand's strides allow it, this is a view; otherwise the operand is copied before the loop.
Literals are in the loop's body.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import fx

from mstpass.graph.axes import TOKEN_AXIS
from mstpass.graph.sizes import Size, generic, generic_shape, generic_stride
from mstpass.graph.tokens import Spec

aten = torch.ops.aten


def is_literal(node: fx.Node) -> bool:
    """Whether the node is a number, which a body holds itself: an input would be one more load."""
    if node.all_input_nodes:
        return False
    is_scalar = node.target is aten.full.default and not node.args[0]
    return is_scalar or node.target is aten.scalar_tensor.default


def layout_of(value: torch.Tensor | Size) -> object:
    """What tells whether code for one operand is code for another one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, str(value.shape), str(value.stride()), value.device
    return str(value)


def is_copied(value: torch.Tensor, spec: Spec) -> bool:
    """Whether no view of the value is ``[N, rest]``, where N counts tokens."""
    layout = TOKEN_AXIS.rows(value.shape, spec)
    return not is_viewable(value, layout.shape, layout.order)


def is_viewable(value: torch.Tensor, shape: Sequence[Size], order: Sequence[int] = ()) -> bool:
    """Whether the value, its dims in this order, can be viewed in a shape.

    A tensor with plain sizes stands in for the value: the question itself would put guards on the
    symbolic sizes of a fake tensor.
    """
    dims = order or range(value.dim())
    sizes, strides = generic_shape(value), generic_stride(value)
    layout = tuple(sizes[d] for d in dims), tuple(strides[d] for d in dims)
    return _has_view(*layout, tuple(map(generic, shape)))


@functools.lru_cache(maxsize=4096)  # the layers of a model ask the same
def _has_view(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(sizes, strides, device="meta").view(shape)
    except (RuntimeError, ValueError):  # ValueError under an active fake tensor mode
        return False
    return True
