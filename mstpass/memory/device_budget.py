"""What ``memory_budget="auto"`` may take on a CUDA device: the memory that it has left for a step.

    left   = free memory of the device + cached, unused memory of torch's allocator - reserve
    budget = the highest of total, total / 2^(1/4), total / 2^(2/4), ... within 95 % of what is left

The reserve is the option of this name. If that is ``"auto"``, it is the memory that the optimizer's
states will take: two float32 numbers for each trainable parameter of the graph, as Adam has. Once
an optimizer has made a step, its states exist, and the reserve is 0.

The budget is part of the keys of compile caches, and plans follow from it. So it takes few values:
processes on equal devices get the same one, though what is free there differs by some percent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mstpass.byte_sizes import parse_bytes
from mstpass.options import Options

_STATE_BYTES = 2 * 4  # for one parameter
_USABLE = 0.95  # of what is left; gaps in the allocator take the rest
_STEPS = 4  # budgets between a number of bytes and its half
_GIB = 2**30
_optimizers_that_stepped: set[str] = set()


@functools.cache
def watch_optimizers() -> None:
    """From now on, remember whether an optimizer of this process has made a step."""

    def stepped(optimizer: Any, *_: Any) -> None:
        _optimizers_that_stepped.add(type(optimizer).__name__)

    register_optimizer_step_post_hook(stepped)


def device_budget_bytes(options: Options, inputs: Sequence[Any]) -> int | None:
    """What a step may take of the CUDA device that an input is on; None unless that is asked for.

    It is asked for by the budget ``"auto"``.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    device = next((x.device for x in tensors if x.device.type == "cuda"), None)
    if options.memory_budget != "auto" or device is None:
        return None
    free, total = free_and_total_bytes(device)
    left = _USABLE * (free - _reserve_bytes(options, tensors))
    total = max(1, round(total / _GIB)) * _GIB  # some bytes less on one board than on another
    if left < 1:
        return 1
    steps = max(0, math.ceil(_STEPS * math.log2(total / left)))
    return max(1, int(total / 2 ** (steps / _STEPS)))


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """The bytes that the next step could allocate on a CUDA device, and all that it has."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached), int(total)


def _reserve_bytes(options: Options, tensors: Sequence[torch.Tensor]) -> int:
    if options.reserve != "auto":
        given = options.reserve
        return int(parse_bytes(given) or 0) if isinstance(given, str) else given
    if _optimizers_that_stepped:
        return 0
    trainable = [x for x in tensors if isinstance(x, torch.nn.Parameter) and x.requires_grad]
    return _STATE_BYTES * sum(x.numel() for x in trainable)
