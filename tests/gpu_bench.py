"""A device and a process for the tests of `mstpass bench gpu`, on the CPU and without processes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mstpass.bench.gpu.device import Step
from mstpass.bench.gpu.runner import attempt
from mstpass.bench.processes import TimedOut


class CpuDevice:
    """Runs steps on the CPU, with peaks that a test gives."""

    torch_device = torch.device("cpu")
    runs = True
    peak = 2**20

    def tensors(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def peak_bytes(self, step: Step) -> int:
        step()
        return self.peak

    def seconds(self, step: Step) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def clocks(self) -> str:
        return "SM 1 MHz"


class Clock:
    """A clock that a test turns on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Calls:
    """Does in this process what new ones would do; each call takes a second of the clock.

    Args:
        work: gets what a process is given, and returns or raises what comes of it; ``Hang``: it
            never ends.
    """

    def __init__(self, work: Callable[[Mapping[str, Any]], Any], clock: Clock):
        self._work, self._clock = work, clock
        self.given: list[Mapping[str, Any]] = []

    def __call__(
        self, given: Mapping[str, Any], variables: Mapping[str, str], limit_s: float
    ) -> Any:
        self.given.append(given)
        try:
            found = self._work(json.loads(json.dumps(given)))
        except Hang:
            self._clock.now += limit_s
            raise TimedOut("a row", f"more than {limit_s:.0f} s") from None
        self._clock.now += 1.0
        return json.loads(json.dumps(found))


class Hang(Exception):
    """The process never ends."""


def done_by(device: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The work of a real process, on a device."""
    return lambda given: attempt(device=device, **given)
