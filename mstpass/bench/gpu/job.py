"""A job: the rows of one case that a worker measures, and the events that it sends meanwhile.

A worker process: it is given a job, and sends an event for each thing that it has done.

The job is one line of JSON on its standard input; each event is one line of JSON on its standard
output. The process leads a process group, so that killing it also ends what it started, and a
Ctrl-C on the terminal reaches only the command itself, which then keeps what was measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mstpass.bench.gpu.device import Device
from mstpass.bench.gpu.state import OUT_OF_MEMORY, Case, Known, Settings
from mstpass.bench.processes import last_error, with_package

RESTART = 75  # exit status: go on in a new process (EX_TEMPFAIL)
WORKER = (sys.executable, "-m", "mstpass.bench.gpu.worker")
_TEXT_CHARS = 160
_LOOK_S = 1.0  # how often to look whether a process has ended

Event = dict[str, Any]


class WorkerProcess:
    """A running worker in a process of its own, as a context manager that ends it."""

    def __init__(
        self,
        job: Mapping[str, Any],
        environment: Mapping[str, str],
        command: Sequence[str] = WORKER,
    ):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=with_package({**os.environ, **environment}),
            start_new_session=True,
        )
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None, "the stdin is known"
        with contextlib.suppress(BrokenPipeError):  # it has ended; its errors say why
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_LOOK_S)
        self._errors.close()

    def next_event(self, timeout_s: float) -> Event | None:
        """The next event, or None when the worker has ended.

        Raises:
            TimeoutError: none came in time.
        """
        end = time.monotonic() + timeout_s
        while True:
            # a child that lives on may hold the pipe open, and no end of the output is seen then
            ended = self._process.poll() is not None
            left = end - time.monotonic()
            try:
                return self._events.get(timeout=max(0.0, min(left, _LOOK_S)))
            except queue.Empty:
                if ended:
                    return None
                if left <= _LOOK_S:
                    raise TimeoutError from None

    def status(self) -> int:
        """The exit status of a worker that has ended; negative: the signal that ended it."""
        return self._process.wait()

    def last_words(self) -> str:
        """The error that it printed last."""
        self._errors.seek(0)
        return last_error(self._errors.read().decode(errors="replace"))[:_TEXT_CHARS]

    def _read(self) -> None:
        assert self._process.stdout is not None, "the stdout is known"
        with self._process.stdout as lines:
            for line in lines:
                self._events.put(json.loads(line))
        self._events.put(None)


# ---- the job -------------------------------------------------------------------------------------
class Restart(Exception):
    """The remaining rows need a new process: this one has run out of memory once."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        wanted: the rows to measure.
        known: what is known of the case already.
        send: sends an event to the command.
    """

    settings: Settings
    case: Case
    wanted: tuple[str, ...]
    known: Known
    device: Device
    send: Callable[[Event], None]

    def start(self, row: str, **probe: Any) -> None:
        """Say which row is measured next, or which ``probe`` of it: its time starts now."""
        self.send({"event": "start", "row": row, "probe": probe})

    def finish(self, row: str, status: str, text: str = "", **figures: Any) -> None:
        """Send the outcome of a row.

        Raises:
            Restart: the row ran out of memory.
        """
        outcome = {"status": status, "text": text, **figures}
        self.send({"event": "row", "row": row, "outcome": outcome})
        if status == OUT_OF_MEMORY:
            raise Restart

    def found(self, row: str, **probe: Any) -> None:
        """Send what a probe of a row has found."""
        self.send({"event": "probe", "row": row, "probe": probe})


def job_data(
    settings: Settings, case: Case, wanted: tuple[str, ...], known: Known
) -> dict[str, Any]:
    """The plain data of a job, for another process."""
    return {
        "settings": {**dataclasses.asdict(settings), "out": str(settings.out)},
        "case": dataclasses.asdict(case),
        "wanted": list(wanted),
        "known": dataclasses.asdict(known),
    }


def job_from(data: Mapping[str, Any], device: Device, send: Callable[[Event], None]) -> Job:
    settings, case = data["settings"], data["case"]
    return Job(
        settings=Settings(**{**settings, "out": Path(settings["out"])}),
        case=Case(**{**case, "rows": tuple(case["rows"])}),
        wanted=tuple(data["wanted"]),
        known=Known(**data["known"]),
        device=device,
        send=send,
    )
