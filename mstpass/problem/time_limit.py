"""Run a function that may never return.

It runs in a thread of its own, because a signal reaches only the main thread, and a process of its
own would need a function that can be pickled. A thread cannot be killed: if the time is over, the
thread gets an exception, which ends any loop of Python's. A call that never comes back from C keeps
its thread, but nobody waits for it, and the program ends without it.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """A function did not return in time."""


class _Stop(BaseException):
    """Raised in the thread whose time is over; no ``except Exception`` of its holds it up."""


def within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, with the values of context variables that hold here.

    Raises:
        TimeLimitError: it did not return within ``seconds``.
    """
    call = contextvars.copy_context().run
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            if over.is_set():
                return
            results.append(call(function, *args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mstpass time limit", daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    finally:  # also if Ctrl-C ends the wait, or the start
        over.set()
        if thread.is_alive():
            _stop(thread)
    error = errors[0] if errors else None
    if isinstance(error, Exception):
        raise error
    if error is not None and not isinstance(error, _Stop):  # sys.exit() would end the program here
        raise RuntimeError(f"it raised {type(error).__name__}") from error
    if not results:
        raise TimeLimitError(f"no result within {seconds:g} s")
    return results[0]


def _stop(thread: threading.Thread) -> None:
    number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
