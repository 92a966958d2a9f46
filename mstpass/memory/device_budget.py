"""The budget of ``memory_budget="auto"``: the memory that a CUDA device has left for a step.

    budget = free memory of the device + cached, unused memory of torch's allocator - reserve

The reserve is the option of this name. If that is ``"auto"``, it is the memory that the optimizer's
states will take: two float32 numbers for each trainable parameter of the graph, as Adam has. Once
an optimizer has made a step, its states exist, and the reserve is 0.
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

_STATE_BYTES = 2 * 4  # for one parameter
_ROUNDED_TO = 256 * 2**20  # bytes; equal budgets find the same entries in compile caches
_optimizers_that_stepped: set[str] = set()


@functools.cache
def watch_optimizers() -> None:
    """From now on, remember whether an optimizer of this process has made a step."""

    def stepped(optimizer: Any, *_: Any) -> None:
        _optimizers_that_stepped.add(type(optimizer).__name__)

    register_optimizer_step_post_hook(stepped)


def with_device_budget(options: Options, inputs: Sequence[Any]) -> Options:
    """The options; ``"auto"`` becomes a number of bytes if an input is on a CUDA device."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    device = next((x.device for x in tensors if x.device.type == "cuda"), None)
    if options.memory_budget != "auto" or device is None:
        return options
    left = free_bytes(device) - _reserve_bytes(options, tensors)
    return dataclasses.replace(options, memory_budget=max(1, left // _ROUNDED_TO * _ROUNDED_TO))


def free_bytes(device: torch.device) -> int:
    """The bytes that the next step could allocate on a CUDA device."""
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
