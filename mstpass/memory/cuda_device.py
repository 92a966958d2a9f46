"""The facts of a CUDA device that the workspaces of kernels depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mstpass.gpus import DEFAULT, gpu

_LEAST_SHARED_MEMORY = 48 * 1024  # bytes of a block, on every device


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """The facts that kernels choose their workspaces by."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block_bytes: int


def cuda_device(device: torch.device) -> CudaDevice:
    """The facts of a device; without one, those of the kind that is assumed everywhere."""
    if not torch.cuda.is_available():
        kind = gpu(DEFAULT)
        return CudaDevice(kind.capability, kind.multiprocessors, kind.shared_memory_per_block_bytes)
    found: Any = torch.cuda.get_device_properties(device)
    return CudaDevice(
        (found.major, found.minor),
        found.multi_processor_count,
        int(getattr(found, "shared_memory_per_block_optin", _LEAST_SHARED_MEMORY)),
    )
