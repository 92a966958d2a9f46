"""Which recomputed ops were of use: their results reach a gradient op, straight or through others.

Tensors are followed by the address of their storage. Every op that allocates is seen, so an
address always belongs to the op that wrote to it last.
"""

from __future__ import annotations

from typing import Any

import torch

from mstpass.torch_internals.dispatch_modes import storage_key
from mstpass.torch_internals.op_types import OpOverload, schema_of
from mstpass.torch_internals.pytrees import tree_leaves

aten = torch.ops.aten
# these read the shape of their operand, not its values
_SHAPE_ONLY = frozenset(
    {
        aten.empty_like,
        aten.full_like,
        aten.new_empty,
        aten.new_empty_strided,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones_like,
        aten.zeros_like,
    }
)


class Flow:
    """The recomputed ops of one step, each under the number it was given, and what they read."""

    def __init__(self) -> None:
        self._producer: dict[int, int] = {}  # storage address -> op
        self._reads: list[set[int]] = []
        self._wanted: set[int] = set()

    def recomputed(self, func: Any, inputs: Any, outputs: Any) -> int | None:
        """Enter an op; its number, or None for one that only makes views."""
        if only_views(func, inputs, outputs):
            return None
        sources, results = _storages(inputs), _storages(outputs)
        writes = _writes(func)
        number = len(self._reads)
        known = {s for s in sources if s in self._producer}
        self._reads.append(
            set() if _shape_only(func) else {self._producer[address] for address in known}
        )
        overwritten = results & sources if writes else set()
        if not results or overwritten - known:
            self._wanted.add(number)  # a value that Python reads, or a write that outlives the run
        for address in (results - sources) | overwritten:
            self._producer[address] = number
        return number

    def other(self, func: Any, inputs: Any, outputs: Any, gradient: bool) -> None:
        """An op of the forward, or one that computes gradients: what it reads is of use."""
        sources = _storages(inputs)
        if gradient and not _shape_only(func):
            self.want(inputs)
        for address in _storages(outputs) - sources:
            self._producer.pop(address, None)

    def want(self, values: Any) -> None:
        """Tensors that something reads which is not seen here."""
        self._wanted |= {self._producer[s] for s in _storages(values) if s in self._producer}

    def used(self) -> list[bool]:
        """By op number, once the step is over."""
        used = [False] * len(self._reads)
        stack = list(self._wanted)
        while stack:
            number = stack.pop()
            if not used[number]:
                used[number] = True
                stack.extend(self._reads[number])
        return used


def only_views(func: Any, inputs: Any, outputs: Any) -> bool:
    """Whether the op computes nothing: its results are views of its operands."""
    results = _storages(outputs)
    return bool(results) and not _writes(func) and results <= _storages(inputs)


def _writes(func: Any) -> bool:
    return schema_of(func).is_mutable if isinstance(func, OpOverload) else True


def _shape_only(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) in _SHAPE_ONLY


def _storages(values: Any) -> set[int]:
    tensors = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
    return {address for address in map(_storage, tensors) if address is not None}


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return None
