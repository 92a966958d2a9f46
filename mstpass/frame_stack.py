"""Run a function that calls deeply, with room for all of its Python frames.

CPython 3.11 and later keep frames in chunks of 16 KiB. A call that does not fit into the last chunk
maps a new one, and its return unmaps it. A loop at such a depth does both at each call, which takes
a fifth of the time of a trace or of a compilation. A frame that needs much room gets a larger
chunk, in which the frames below it fit as well.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 2**16  # the frame's own; its chunk, a power of two, has about as many for others


def with_deep_stack(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(*args, **kwargs)``."""
    found: T = _call_with_large_frame(function, *args, **kwargs)
    return found


def _call(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


_call_with_large_frame = types.FunctionType(
    _call.__code__.replace(co_stacksize=_SLOTS), globals(), "_call_with_large_frame"
)
