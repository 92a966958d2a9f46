"""Patches of what all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class SharedPatch:
    """A patch that is there while at least one thread needs it.

    The first thread to enter makes it and the last one to leave undoes it. A patch of one thread's
    own would restore, when it ends, what another thread's patch has put there.

    Args:
        patch: makes the patch, as a context.
    """

    def __init__(self, patch: Callable[[], AbstractContextManager[Any]]):
        self._patch = patch
        self._lock = threading.Lock()
        self._undo = ExitStack()
        self._threads = 0

    @property
    def is_made(self) -> bool:
        return self._threads > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._threads:
                self._undo.enter_context(self._patch())
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._undo.close()
