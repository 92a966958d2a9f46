"""A function that runs in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any

from mstpass.errors import UserError
from mstpass.frame_stack import with_deep_stack


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def background(
    function: Callable[..., Any], args: tuple[Any, ...], does: str
) -> Iterator[Callable[[], Any]]:
    """Runs ``function(*args)`` in a new process, until it is done or the block ends.

    The block has a function that waits for the result. An error is raised there, a `UserError` if
    the process has ended without an answer.

    Args:
        function: one that can be imported; its arguments and its result are plain data.
        does: what the process does, for messages of errors.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
    # this process shows warnings: it builds the same model
    quiet = functools.partial(warnings.simplefilter, "ignore")
    pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=quiet)
    # An interrupt of the terminal goes to both processes, and is for this one to handle. The
    # tracker comes first, because to start it unblocks the signal.
    resource_tracker.ensure_running()
    others = multiprocessing.active_children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        future = pool.submit(with_deep_stack, function, *args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def result() -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            text = f"the process that {does} has ended, as where memory runs out"
            raise UserError(text) from error

    try:
        yield result
    finally:
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()
        pool.shutdown()
