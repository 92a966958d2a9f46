"""Measures peak tensor memory and step time, in the same way for every backend.

The *peak* of a call is the highest number of tensor bytes that are allocated while it runs, beyond
those that are allocated when it begins. Gradients that the call leaves behind count. CPU peaks are
read from the memory events of `torch.profiler`, CUDA peaks from the caching allocator. Neither sees
memory that a library allocates without torch's allocators. On the CPU, tensors from before the call
that it frees, such as old gradients, do not lower its peak: their sizes are not known.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from mstpass.report.compare import events_of_profile, measured
from mstpass.torch_internals.versions import installed

Step = Callable[[], object]
Device = str | torch.device
Key = TypeVar("Key")


@dataclass(frozen=True)
class Timing:
    """Wall times of one function, in the order in which they were taken."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        return min(self.seconds)

    def ratio_to(self, other: Timing) -> float:
        """Median of the ratios taken round by round; it is less noisy than a ratio of medians."""
        rounds = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(a / b for a, b in rounds)


def peak_bytes(fn: Step, device: Device = "cpu") -> int:
    """The peak of `fn()`: the most tensor bytes on `device` beyond those at its start.

    Call a compiled step once before. On CUDA its first call also tunes kernels, with buffers of
    their own, and allocates the workspaces of cuBLAS, which stay.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"peak_bytes measures devices of type cpu and cuda, not {kind!r}")
    gc.collect()  # garbage that is freed during fn() would hide a part of its peak
    return _cuda_peak_bytes(fn, device) if kind == "cuda" else _cpu_peak_bytes(fn)


def timed(
    fns: Mapping[Key, Step], repeats: int = 5, *, warmup: int = 1, device: Device = "cpu"
) -> dict[Key, Timing]:
    """Wall times of each function, in rounds A B C, A B C, ... so that noise affects all alike."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    for fn in fns.values():
        for _ in range(warmup):
            fn()
    seconds: dict[Key, list[float]] = {key: [] for key in fns}
    for _ in range(repeats):
        for key, fn in fns.items():
            seconds[key].append(_seconds(fn, device))
    return {key: Timing(tuple(values)) for key, values in seconds.items()}


def synchronize(device: Device) -> None:
    """Wait until the device has finished its work, so that a clock can be read."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(fn: Step, device: Device) -> float:
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    return time.perf_counter() - start


def _cuda_peak_bytes(fn: Step, device: Device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def _cpu_peak_bytes(fn: Step) -> int:
    # one cycle has nothing to accumulate, but older versions warn where acc_events is off
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _quiet_stderr():
        profiler.start()
    try:
        fn()
    finally:
        with _quiet_stderr():
            profiler.stop()
    return measured(events_of_profile(profiler)).peak_bytes


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence file descriptor 2, on which the profiler's C++ code announces its start and stop."""
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, ValueError, AttributeError):
        yield  # no stderr to silence
        return
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def device_name(device: torch.device) -> str:
    """The name of the device and the version of torch, for captions."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {installed()}"
    return f"{cpu_name()}, {os.cpu_count()} cores, torch {installed()}"


def cpu_name() -> str:
    """The name of the processor, or of its architecture where the system tells no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
