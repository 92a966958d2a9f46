"""A function that runs in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from mstpass.errors import UserError
from mstpass.frame_stack import with_deep_stack


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Background:
    """Runs ``function(*args)`` in a new process, until it is done or the block ends.

    Args:
        function: one that can be imported; its arguments and its result are plain data.
        does: what the process does, for messages of errors.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], does: str):
        self._does = does
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
        self._answer, answer = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(answer, function, args), daemon=True)
        # An interrupt of the terminal goes to both processes, and is for this one to handle. The
        # tracker comes first, because to start it unblocks the signal.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        answer.close()  # the other process has the only end to write to: its end is seen

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()
        self._answer.close()

    def result(self) -> Any:
        """Wait for the result; an error of the function is raised here.

        Raises:
            UserError: the process has ended without an answer.
        """
        try:
            found, error = self._answer.recv()
        except (EOFError, OSError):
            self._process.join()
            raise UserError(
                f"the process that {self._does} has ended (exit code "
                f"{self._process.exitcode}; -9: it was killed, as where memory runs out)"
            ) from None
        if error is not None:
            raise error
        return found


def _serve(answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in the new process."""
    warnings.simplefilter("ignore")  # the other process shows them, as it builds the same model
    try:
        answer.send((with_deep_stack(function, *args), None))
    except UserError as error:
        answer.send((None, error))
    except Exception:
        answer.send((None, RuntimeError(f"in another process:\n{traceback.format_exc()}")))
