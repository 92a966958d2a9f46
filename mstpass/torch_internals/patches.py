"""Patches of what all threads of a process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class SharedPatch:
    """A patch that is there while at least one thread needs it.

    The first thread to enter makes it and the last one to leave undoes it. A patch of one thread's
    own would restore, when it ends, what another thread's patch has put there. A forked process has
    the thread that forked alone, so only that thread's need counts in it.

    Args:
        patch: makes the patch, as a context.
    """

    def __init__(self, patch: Callable[[], AbstractContextManager[Any]]):
        self._patch = patch
        self._lock = threading.Lock()
        self._undo = ExitStack()
        self._threads: list[int] = []  # once for each time that one has entered
        os.register_at_fork(after_in_child=self._forked)

    @property
    def is_made(self) -> bool:
        return bool(self._threads)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._undo.enter_context(self._patch())
            self._threads.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(thread)
                if not self._threads:
                    self._undo.close()

    def _forked(self) -> None:
        self._lock = threading.Lock()  # a thread that is not here may hold the other one
        here = [thread for thread in self._threads if thread == threading.get_ident()]
        if self._threads and not here:
            self._undo.close()
        self._threads = here
