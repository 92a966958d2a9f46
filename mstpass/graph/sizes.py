"""Sizes that hold symbols: compared and counted without a guard, and written into new graphs.

Under ``dynamic=True``, or from a second sequence length on, sizes are ``SymInt``: expressions such
as ``s77*s27`` of the inputs' symbols. To ask ``a == b`` of two of them may install a guard, that
is, compile the graph again for inputs where the answer differs. So they are never asked:

    generic: a size at one fixed point, where each symbol is a large odd number of its own. Two
             expressions that are equal there are equal everywhere but for an accident, which the
             shape checks of body.py and apply.py would refuse. Structure is decided by it.
    hint:    a size in the batch that the graph was traced with. Costs are estimated by it.

A *size node* is a node whose value is a ``SymInt``: a placeholder, or arithmetic on such.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable

import sympy
import torch
from torch import fx

Size = int | torch.SymInt
_LEAST_GENERIC = 2**16


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def is_static(value: torch.Tensor) -> bool:
    """Whether every size is a plain int."""
    return all(isinstance(size, int) for size in value.shape)


def expression(size: Size) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def generic(size: Size) -> int:
    if isinstance(size, int):
        return size
    expr = expression(size)
    return int(expr.xreplace({s: sympy.Integer(_point(s.name)) for s in expr.free_symbols}))


@functools.cache
def _point(symbol: str) -> int:
    return _LEAST_GENERIC + zlib.crc32(symbol.encode()) % _LEAST_GENERIC | 1


def generic_shape(value: torch.Tensor) -> torch.Size:
    return torch.Size(map(generic, value.shape))


def generic_stride(value: torch.Tensor) -> list[int]:
    return list(map(generic, value.stride()))


def hint(size: Size) -> int:
    """The traced size; 1 where there is none (a size that depends on data)."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def hint_shape(value: torch.Tensor) -> list[int]:
    return list(map(hint, value.shape))


def depends_on_data(value: torch.Tensor) -> bool:
    return not all(map(_has_hint, value.shape))


def _has_hint(size: Size) -> bool:
    return isinstance(size, int) or size.node.has_hint()


def symbols_of(value: object) -> set[sympy.Symbol]:
    """The symbols in a size, or in a tensor's sizes, strides and offset."""
    if not isinstance(value, torch.Tensor):
        return set(expression(value).free_symbols) if isinstance(value, torch.SymInt) else set()
    layout = (*value.shape, *value.stride(), value.storage_offset())
    return {symbol for size in layout for symbol in expression(size).free_symbols}


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    return list(map(expression, a)) == list(map(expression, b))
