"""What is measured on, behind one small interface: a CUDA device, or none in a dry run.

Peaks come from CUDA's caching allocator, times from CUDA events.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mstpass.bench.gpu.environment import clocks
from mstpass.measure import peak_bytes
from mstpass.torch_internals.fake_tensors import FakeTensorMode

Step = Callable[[], object]

_ROUNDS, _SLOW_ROUNDS, _QUICK_ROUNDS = 10, 3, 2
_SLOW_S = 2.0  # steps that are slower than this are timed in fewer rounds


class Device:
    """A device that steps run on.

    Attributes:
        torch_device: where the tensors of a step are.
        runs: whether steps run; otherwise they are traced and planned.
    """

    torch_device: torch.device
    runs: bool

    def tensors(self) -> AbstractContextManager[Any]:
        """A context in which tensors are made and eager steps run."""
        return contextlib.nullcontext()

    def peak_bytes(self, step: Step) -> int:
        """The most bytes of tensors while a step runs, beyond those at its start."""
        raise NotImplementedError

    def highest_bytes(self, step: Step) -> int:
        """The most bytes of tensors while a step runs, all that is allocated included."""
        raise NotImplementedError

    def seconds(self, step: Step) -> float:
        """The time of one step."""
        raise NotImplementedError

    def limit_memory(self, size: int) -> None:
        """Let this process allocate no more than ``size`` bytes."""

    def free(self) -> None:
        """Give back what is not needed any more."""
        gc.collect()

    def clocks(self) -> str:
        """The clocks of the device at this moment."""
        return ""


class CudaDevice(Device):
    """The current CUDA device."""

    torch_device = torch.device("cuda", 0)
    runs = True

    def peak_bytes(self, step: Step) -> int:
        return peak_bytes(step, self.torch_device)

    def highest_bytes(self, step: Step) -> int:
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def seconds(self, step: Step) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def limit_memory(self, size: int) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))

    def free(self) -> None:
        super().free()
        torch.cuda.empty_cache()

    def clocks(self) -> str:
        return clocks()


class NoDevice(Device):
    """The device of a dry run: tensors without memory, and a timer that says one second."""

    torch_device = torch.device("cpu")
    runs = False

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    def tensors(self) -> AbstractContextManager[Any]:
        return self._mode

    def peak_bytes(self, step: Step) -> int:
        return 0

    def seconds(self, step: Step) -> float:
        return 1.0


def time_in_turn(device: Device, steps: Mapping[str, Step], quick: bool) -> dict[str, list[float]]:
    """Seconds of each step in rounds A B, B A, ...: what disturbs one round disturbs all steps.

    Each step has run before; it runs once more before its first round.
    """
    first = {name: device.seconds(step) for name, step in steps.items()}
    slow = statistics.fmean(first.values()) > _SLOW_S
    rounds = _QUICK_ROUNDS if quick else _SLOW_ROUNDS if slow else _ROUNDS
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(device.seconds(steps[name]))
    return seconds
