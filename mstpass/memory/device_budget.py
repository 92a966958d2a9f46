"""The memory that a device has left: for a step, and when one has failed.

What ``memory_budget="auto"`` may take on a CUDA device is what it has left for a step.

    left   = free memory of the device + cached, unused memory of torch's allocator - reserve
    budget = the highest of total, total / 2^(1/4), total / 2^(2/4), ... within 95 % of what is left

The reserve is the option of this name. If that is ``"auto"``, it is the memory that the optimizer's
states will take: two float32 numbers for each trainable parameter of the graph, as Adam has. Once
an optimizer has made a step, its states exist, and the reserve is 0.

The budget is part of the keys of compile caches, and plans follow from it. So it takes few values:
processes on equal devices get the same one, though what is free there differs by some percent.

A ``Failure`` is what an error of an allocator says, and what the device had left at that moment.
The terms, of one failed step on a CUDA device::

    used     what the step had allocated when it failed, and what it asked for
    others   what is allocated once the step's buffers are freed: parameters, other graphs, batches
    cached   what the allocator held and could not use: gaps between the blocks

On the CPU only the request is known. Source: c10/core/impl/alloc_cpu.cpp, and
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mstpass.byte_sizes import bytes_text
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
    if isinstance(options.reserve, int):
        return options.reserve
    if _optimizers_that_stepped:
        return 0
    trainable = [x for x in tensors if isinstance(x, torch.nn.Parameter) and x.requires_grad]
    return _STATE_BYTES * sum(x.numel() for x in trainable)


_LOWER = 0.95  # of the plan that failed: the least that a leaner one is lower by
_UNKNOWN = 0.8  # of it, where nobody knows how much was missing

_CPU_ERRORS = ("can't allocate memory", "not enough memory", "bad_alloc")
_REQUEST = re.compile(r"ried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A step that ran out of memory.

    Attributes:
        kind: the type of the error.
        text: its message.
        phase: ``"forward"`` or ``"backward"``.
        requested_bytes: what could not be allocated; None if the error does not say.
        free_bytes: what the device has for a step, once this one's buffers are freed; None on the
            CPU, as for the next three.
    """

    kind: type[Exception]
    text: str
    phase: str
    requested_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    others_bytes: int | None = None
    cached_bytes: int | None = None

    def fitting_bytes(self, peak_bytes: int | None) -> int | None:
        """The budget of a plan that fits; None: nothing is known but that less is better.

        Args:
            peak_bytes: of the plan that failed. On CUDA the step had more than that if the
                simulation is too low; then the next plan's may be as well.
        """
        if peak_bytes is None:
            return None
        if self.free_bytes is not None and self.used_bytes is not None:
            too_low = max(1.0, self.used_bytes / max(1, peak_bytes))
            fits = int(_USABLE * min(self.free_bytes, self.used_bytes) / too_low)
        elif self.requested_bytes is not None:
            fits = peak_bytes - self.requested_bytes
        else:
            fits = int(_UNKNOWN * peak_bytes)
        fits = min(fits, int(_LOWER * peak_bytes))
        return fits if fits > 0 else None

    def of_device(self) -> str:
        """What else was on the device, as a sentence; "" where it is not known."""
        if self.used_bytes is None or self.others_bytes is None or self.cached_bytes is None:
            return ""
        return (
            f"The step had, or asked for, {bytes_text(self.used_bytes)}; "
            f"{bytes_text(self.others_bytes)} are allocated by others, and the allocator held "
            f"{bytes_text(self.cached_bytes)} in gaps (fragmentation). "
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of the device or of the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_ERRORS)


def failure_of(error: Exception, phase: str, device: torch.device) -> Failure:
    """Read the error of a step, and free what its frames hold: buffers of a step that is over."""
    allocated = reserved = 0
    on_cuda = device.type == "cuda"
    if on_cuda:
        allocated, reserved = _allocated_and_reserved(device)
    _free(error)
    match = _REQUEST.search(str(error))
    requested = int(float(match[1]) * _UNITS[match[2]]) if match else None
    failure = Failure(type(error), str(error), phase, requested)
    if not on_cuda:
        return failure
    torch.cuda.empty_cache()
    others, _ = _allocated_and_reserved(device)
    return dataclasses.replace(
        failure,
        free_bytes=free_and_total_bytes(device)[0],
        used_bytes=max(0, allocated - others) + (requested or 0),
        others_bytes=others,
        cached_bytes=reserved - allocated,
    )


def _allocated_and_reserved(device: torch.device) -> tuple[int, int]:
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def _free(error: BaseException) -> None:
    """Drop the local variables of the frames that the error has left behind."""
    seen: set[int] = set()
    each: Any = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
