"""A function that runs in a process of its own, and reports how far it is.

The trace of a whole model, beside which a copy of few layers is searched (compiled_rows.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from mstpass.errors import UserError
from mstpass.frame_stack import with_deep_stack
from mstpass.planner.compiled_step import LEAST
from mstpass.planner.deepen import is_same
from mstpass.planner.models import config_of
from mstpass.planner.request import WHOLE, Report, Steps
from mstpass.planner.room import Room, traceable
from mstpass.planner.traced_step import TracedStep, trace
from mstpass.tracing.devices import traced_for

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
                    self._report(*value)
                else:
                    self._answer = kind, value
        except (EOFError, OSError):
            return


def _serve(messages: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in the new process."""
    warnings.simplefilter("ignore")  # the other process shows them, as it builds the same model

    def report(*progress: Any) -> None:
        messages.send((_PROGRESS, progress))

    try:
        messages.send((_RESULT, with_deep_stack(function, *args, report)))
    except UserError as error:
        messages.send((_ERROR, error))
    except Exception:
        text = f"in another process:\n{traceback.format_exc()}"
        messages.send((_ERROR, RuntimeError(text)))


# ---- whole model ---------------------------------------------------------------------------------
_WHAT = "traces the whole model"


class WholeModel:
    """The whole model's trace at one length; with a process to spare, it is made meanwhile.

    Args:
        length, multiple: as of `trace`.
        processes: with more than one, another process traces the model while the block runs.
        report: is told how far the trace is.
    """

    def __init__(
        self, room: Room, length: int, multiple: int | None, processes: int, report: Report
    ):
        self._args, self._report = (room, length, multiple), report
        self._stack = contextlib.ExitStack()
        self._background: Background | None = None
        if processes > 1:
            background = Background(_in_process, self._args, report, _WHAT)
            self._background = self._stack.enter_context(background)

    def __enter__(self) -> WholeModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def is_like(self, copy: TracedStep) -> bool:
        """Whether the model's problem is that of a deepened copy, but for names."""
        return is_same(copy.problems[LEAST], self._traced().problems[LEAST])

    def _traced(self) -> TracedStep:
        if self._background is not None:
            # It was killed, as where memory runs out; the model's own error is raised again below.
            with contextlib.suppress(UserError):
                found: TracedStep = self._background.result()
                return found
        return whole_step(*self._args, self._report)


def whole_step(room: Room, length: int, multiple: int | None, report: Report) -> TracedStep:
    """The traced step of a request's model, with the problem of the least memory."""
    request, steps = room.request, Steps(report, WHOLE, 1)
    steps.begin(f"tracing {length:,} tokens")
    config, host_bytes = config_of(request.model), request.host_bytes
    with traceable(request):
        found = trace(config, request.training, length, (LEAST,), multiple, None, host_bytes)
    steps.end()
    return found


def _in_process(room: Room, length: int, multiple: int | None, report: Report) -> TracedStep:
    with traced_for(room.request.traced_device, room.request.gpu):
        return whole_step(room, length, multiple, report)
