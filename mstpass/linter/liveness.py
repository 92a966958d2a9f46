"""Liveness of recomputed ops: which of their results reach an op that computes a gradient.

A result may reach a gradient op directly, or through other recomputed ops. Tensors are followed by
the address of their storage. Every op that allocates is seen, so an address always belongs to the
op that wrote to it last.
"""

from __future__ import annotations

from typing import Any

import torch

from mstpass.torch_internals.fake_tensors import storage_key
from mstpass.torch_internals.graphs import OpOverload, schema_of, tree_leaves

aten = torch.ops.aten
# ops that read the shape of their operand but not its values
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


class RecomputeLiveness:
    """The recomputed ops of one step, numbered as they run, and which of them each one reads."""

    def __init__(self) -> None:
        self._producer: dict[int, int] = {}  # storage address -> op
        self._reads: list[set[int]] = []  # by op: the ops whose results it reads
        self._live: set[int] = set()  # ops that are read by a gradient op, or unseen

    def add_recomputed(self, func: Any, inputs: Any, outputs: Any) -> int | None:
        """Record a recomputed op. Returns its number, or None for an op that only makes views."""
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
            # its result is a Python value, or it writes to memory that outlives the recomputation
            self._live.add(number)
        for address in (results - sources) | overwritten:
            self._producer[address] = number
        return number

    def add_other(self, func: Any, inputs: Any, outputs: Any, gradient: bool) -> None:
        """Record an op of the forward or, with ``gradient``, one that computes a gradient.

        What a gradient op reads is live.
        """
        sources = _storages(inputs)
        if gradient and not _shape_only(func):
            self.mark_live(inputs)
        for address in _storages(outputs) - sources:
            self._producer.pop(address, None)

    def mark_live(self, values: Any) -> None:
        """Record that something reads these tensors, seen here or not."""
        self._live |= {self._producer[s] for s in _storages(values) if s in self._producer}

    def live_ops(self) -> list[bool]:
        """After the step: for each op number, whether a gradient depends on the op's result."""
        live = [False] * len(self._reads)
        stack = list(self._live)
        while stack:
            number = stack.pop()
            if not live[number]:
                live[number] = True
                stack.extend(self._reads[number])
        return live


def only_views(func: Any, inputs: Any, outputs: Any) -> bool:
    """Whether the op only makes views: it writes nothing, and all results alias operands."""
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
    except (
        NotImplementedError,
        RuntimeError,
    ):  # sparse tensors and some subclasses have no storage
        return None
