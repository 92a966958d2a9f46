"""The worker: measures the rows of one case in a process of its own, and sends events.

    python -m mstpass.bench.gpu.worker < job.json

Exit status 75: rows are left, and need a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from mstpass.bench.gpu.device import CudaDevice, Device, NoDevice
from mstpass.bench.gpu.job import RESTART, Event, Job, Restart, job_from
from mstpass.bench.gpu.runner import PARTS


def main() -> int:
    data = json.loads(sys.stdin.readline())
    device: Device = NoDevice() if data["settings"]["dry"] else CudaDevice()
    with _events_on_stdout() as send:
        return run(job_from(data, device, send))


def run(job: Job) -> int:
    """Do a job; returns the exit status."""
    try:
        PARTS[job.case.part].work(job)
    except Restart:
        return RESTART
    return 0


@contextlib.contextmanager
def _events_on_stdout() -> Iterator[Callable[[Event], None]]:
    """A function that writes events to standard output, where nothing else is written meanwhile."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:
        os.dup2(2, 1)  # what libraries print goes to standard error
        yield lambda event: _write(events, event)


def _write(file: TextIO, event: Event) -> None:
    file.write(json.dumps(event) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
