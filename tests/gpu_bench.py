"""A device and a process for the tests of `mstpass bench gpu`, on the CPU and without processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mstpass.bench.gpu import worker
from mstpass.bench.gpu.device import Step
from mstpass.bench.gpu.job import Event, job_from


class CpuDevice:
    """Runs steps on the CPU, with peaks that a test gives."""

    torch_device = torch.device("cpu")
    runs = True
    peak = 2**20

    def __init__(self) -> None:
        self.limit_bytes = 2**30

    def tensors(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def peak_bytes(self, step: Step) -> int:
        step()
        return self.peak

    def highest_bytes(self, step: Step) -> int:
        step()
        return self.peak

    def seconds(self, step: Step) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def limit_memory(self, size: int) -> None:
        self.limit_bytes = size

    def free(self) -> None:
        pass

    def clocks(self) -> str:
        return "SM 1 MHz"


class Clock:
    """A clock that a test turns on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class InProcess:
    """A worker that does its job in this process; each event takes a second of the clock.

    Args:
        work: does a job: yields events, ``Hang`` or ``Die``, and returns the exit status.
    """

    def __init__(self, work: Callable[[Mapping[str, Any]], Iterator[Any]], clock: Clock):
        self._work, self._clock, self._status, self._words = work, clock, 0, ""
        self.jobs: list[Mapping[str, Any]] = []

    def launch(self, job: Mapping[str, Any], environment: Mapping[str, str]) -> InProcess:
        self.jobs.append(job)
        self._events = self._work(job)
        self._status, self._words = 0, ""
        return self

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def next_event(self, timeout_s: float) -> Event | None:
        found = next(self._events, None)
        if isinstance(found, Die):
            self._status, self._words = found.args
            return None
        if isinstance(found, Hang):
            self._clock.now += timeout_s
            raise TimeoutError
        if isinstance(found, BaseException):
            raise found
        self._clock.now += 1.0
        return found

    def status(self) -> int:
        return self._status

    def last_words(self) -> str:
        return self._words


class Hang(Exception):
    """The worker sends nothing any more."""


class Die(Exception):
    """The worker ends with an exit status and an error."""


def done_by(device: Any) -> Callable[[Mapping[str, Any]], Iterator[Any]]:
    """The work of a real worker, on a device."""

    def work(data: Mapping[str, Any]) -> Iterator[Any]:
        events: list[Event] = []
        status = worker.run(job_from(data, device, events.append))
        yield from events
        if status:
            yield Die(status, "")

    return work
