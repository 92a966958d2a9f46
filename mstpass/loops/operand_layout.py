"""How a loop reads an operand: as ``[tokens, rest]``, a view where strides allow, else a copy."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from mstpass.graph.sizes import Size, generic, generic_shape, generic_stride
from mstpass.graph.tokens import Spec


def rows_of(value: torch.Tensor, spec: Spec) -> tuple[list[int], list[Size]]:
    """The order of dims with the tokens' first, and the shape ``[tokens, rest]``."""
    rest = [d for d in range(value.dim()) if d not in spec]
    tokens: Size = math.prod(value.shape[d] for d in spec)
    shape: list[Size] = [tokens, *(value.shape[d] for d in rest)]
    return [*spec, *rest], shape


def is_copied(value: torch.Tensor, spec: Spec) -> bool:
    """Whether no view is ``[tokens, rest]``."""
    order, shape = rows_of(value, spec)
    return not is_viewable(value, shape, order)


def is_viewable(value: torch.Tensor, shape: Sequence[Size], order: Sequence[int] = ()) -> bool:
    """Whether the value, its dims in this order, can be shown in a shape.

    Asked of a stand-in without symbols: to ask a fake tensor could guard on its sizes.
    """
    dims = order or range(value.dim())
    sizes, strides = generic_shape(value), generic_stride(value)
    layout = tuple(sizes[d] for d in dims), tuple(strides[d] for d in dims)
    return _has_view(*layout, tuple(map(generic, shape)))


@functools.lru_cache(maxsize=4096)  # the layers of a model are alike
def _has_view(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(sizes, strides, device="meta").view(shape)
    except (RuntimeError, ValueError):  # a fake mode in force raises the latter
        return False
    return True
