"""Run a graph op by op, with values laid out in memory as they were when the graph was traced.

Some of torch's ops return other strides than their fake tensors have. Inductor keeps to the traced
ones where an op asks for them, as the loops do when they read a value by its strides. So does this
interpreter; without it, the loops would read the right memory in the wrong order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from mstpass.graph.sizes import Size, expression


class AsTraced(fx.Interpreter):
    """Runs a graph, and copies a result that is dense in other strides than its fake tensor."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.known: dict[sympy.Symbol, int] = {}  # the sizes of this run

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        traced = n.meta.get("val")
        if n.op == "placeholder":
            self._learn(traced, result)
            return result
        if isinstance(result, tuple | list) and isinstance(traced, tuple | list):
            pairs = zip(result, traced, strict=True)
            return type(result)(self._as_traced(value, fake) for value, fake in pairs)
        return self._as_traced(result, traced)

    def _learn(self, traced: Any, value: Any) -> None:
        sizes = zip(_sizes(traced), _sizes(value), strict=False)
        for symbolic, size in sizes:
            expr = expression(symbolic)
            if isinstance(expr, sympy.Symbol):
                self.known[expr] = int(size)

    def _as_traced(self, value: Any, traced: Any) -> Any:
        if not isinstance(value, Tensor) or not isinstance(traced, Tensor):
            return value
        strides = [self._number(stride) for stride in traced.stride()]
        wanted = [stride for stride in strides if stride is not None]
        if len(wanted) < len(strides):
            return value
        apart = [d for d, size in enumerate(value.shape) if size != 1]
        if all(value.stride(d) == wanted[d] for d in apart) or not _is_dense(value.shape, wanted):
            return value
        laid_out = torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)
        return laid_out.copy_(value)

    def _number(self, size: Size) -> int | None:
        """The size in this run; None if it depends on data."""
        if isinstance(size, int):
            return size
        found = expression(size).subs(self.known)
        return int(found) if found.is_Integer else None


def _sizes(value: Any) -> Sequence[Size]:
    if isinstance(value, Tensor):
        return value.shape
    return [value] if isinstance(value, int | torch.SymInt) else []


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory, each once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
