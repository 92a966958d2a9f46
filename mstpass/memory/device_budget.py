"""The memory that a CUDA device has left for a step, where the budget is ``"auto"``.

What the driver has free, and what torch's allocator holds without using it, less a reserve. Before
an optimizer's first step the reserve is what its states will take: two of float32 for each
trainable parameter of the graph, as Adam has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mstpass.byte_sizes import parse_bytes
from mstpass.options import Options

_STATE_BYTES = 2 * 4  # of one parameter
_GRAIN = 256 * 2**20  # budgets are multiples of it, so that compile caches are hit again
_optimizers_that_stepped: set[str] = set()


@functools.cache
def watch_optimizers() -> None:
    """Take note of the first step of any optimizer in this process."""

    def stepped(optimizer: Any, *_: Any) -> None:
        _optimizers_that_stepped.add(type(optimizer).__name__)

    register_optimizer_step_post_hook(stepped)


def with_device_budget(options: Options, inputs: Sequence[Any]) -> Options:
    """Options in which ``"auto"`` is a number of bytes, where the graph's inputs lie on CUDA."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    device = next((x.device for x in tensors if x.device.type == "cuda"), None)
    if options.memory_budget != "auto" or device is None:
        return options
    left = free_bytes(device) - _reserve_bytes(options, tensors)
    return dataclasses.replace(options, memory_budget=max(1, left // _GRAIN * _GRAIN))


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that the next step could allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def _reserve_bytes(options: Options, tensors: Sequence[torch.Tensor]) -> int:
    if options.reserve != "auto":
        given = options.reserve
        return int(parse_bytes(given) or 0) if isinstance(given, str) else given
    if _optimizers_that_stepped:
        return 0
    trainable = [x for x in tensors if isinstance(x, torch.nn.Parameter) and x.requires_grad]
    return _STATE_BYTES * sum(x.numel() for x in trainable)
