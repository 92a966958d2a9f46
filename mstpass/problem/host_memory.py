"""Saved values that wait in host memory between forward and backward.

A saved value may be *offloaded*: forward copies it to pinned memory of the host and frees it on the
device, and backward copies it back (*reloads* it) in time for its first use. All copies of a graph
run one after the other on a stream of their own, beside the device's computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Host:
    """The host memory that a step may use, and the way to it.

    Attributes:
        budget_bytes: pinned memory that a plan may take of its own accord. What checkpoint policies
            offload does not count against it.
        offload_bytes_per_us: speed of copies from the device to the host.
        reload_bytes_per_us: speed of copies from the host to the device.
    """

    budget_bytes: int
    offload_bytes_per_us: float
    reload_bytes_per_us: float

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise ValueError(f"budget_bytes={self.budget_bytes} must not be negative")
        for name in ("offload_bytes_per_us", "reload_bytes_per_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What values of these sizes, in bytes, take of pinned memory.

    torch's allocator for it rounds each block up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h).
    """
    return sum(1 << (size - 1).bit_length() for size in sizes if size > 0)
