"""What a buffer takes from the allocator.

On CUDA a buffer takes whole blocks, elsewhere its size.

``torch.cuda.max_memory_allocated`` counts blocks, not sizes. Source:
c10/cuda/CUDACachingAllocator.cpp (``round_size``). Without ``expandable_segments`` it may
also hand out a block that is up to 1 MiB larger than what is asked for; that is not counted.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.attention_sizes import round_up
from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import hint_numel

BLOCK = 512  # bytes: blocks are multiples of it


def rounded(size: int) -> int:
    """The blocks for ``size`` bytes."""
    return round_up(size, BLOCK)


def allocated_bytes(size: int, device: torch.device | None) -> int:
    """What a buffer of ``size`` bytes takes on a device."""
    return rounded(size) if device is not None and device.type == "cuda" else size


def bytes_on_gpu(size: int, device: torch.device | None) -> int:
    """The same of a GPU's memory, of which a buffer on the host takes nothing."""
    return 0 if device is not None and device.type == "cpu" else allocated_bytes(size, device)


def buffer_bytes(node: fx.Node) -> int:
    """What the tensors of a node take; symbolic sizes count with their hint."""
    return sum(
        allocated_bytes(hint_numel(value) * value.element_size(), value.device)
        for value in tensors_of(node.meta.get("val"))
    )
