"""A function that runs in a process of its own, and reports what it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from mstpass.errors import UserError
from mstpass.frame_stack import with_deep_stack
from mstpass.planner.request import Report

_PROGRESS, _RESULT, _ERROR = "progress", "result", "error"


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Background:
    """Runs ``function(*args, report)`` in a new process, until it is done or the block ends.

    Args:
        function: one that can be imported; its arguments and its result are plain data.
        report: is called here, in another thread, with what the function reports.
        does: what the process does, for messages of errors.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], report: Report, does: str
    ):
        self._report, self._does = report, does
        self._answer: tuple[str, Any] | None = None
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
        self._messages, messages = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(messages, function, args), daemon=True)
        # An interrupt of the terminal goes to both processes, and is for this one to handle. The
        # tracker comes first, because to start it unblocks the signal.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        messages.close()  # the other process has the only end to write to: its end is seen
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()
        self._reader.join()
        self._messages.close()

    def result(self) -> Any:
        """Wait for the result; an error of the function is raised here.

        Raises:
            UserError: the process has ended without an answer.
        """
        self._reader.join()
        if self._answer is None:
            self._process.join()
            raise UserError(
                f"the process that {self._does} has ended (exit code "
                f"{self._process.exitcode}; -9: it was killed, as where memory runs out)"
            )
        kind, value = self._answer
        if kind == _ERROR:
            raise value
        return value

    def _read(self) -> None:
        """Pass reports on until the answer comes or the process ends."""
        try:
            while self._answer is None:
                kind, value = self._messages.recv()
                if kind == _PROGRESS:
                    self._report(value)
                else:
                    self._answer = kind, value
        except (EOFError, OSError):
            return


def _serve(messages: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in the new process."""
    warnings.simplefilter("ignore")  # the other process shows them, as it builds the same model

    def report(what: str) -> None:
        messages.send((_PROGRESS, what))

    try:
        messages.send((_RESULT, with_deep_stack(function, *args, report)))
    except UserError as error:
        messages.send((_ERROR, error))
    except Exception:
        text = f"in another process:\n{traceback.format_exc()}"
        messages.send((_ERROR, RuntimeError(text)))
