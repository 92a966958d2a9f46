"""Exchanges what a function of another library calls, in a copy of it, for one object alone."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from mstpass.errors import UserError


class TrainerError(UserError, ValueError):
    """A trainer cannot be compiled as it is set up; the message says what to change."""


def with_calls_exchanged(
    function: Callable[..., Any], exchanges: dict[str, Callable[..., Any]]
) -> types.FunctionType:
    """A copy of a Python function that calls other functions where it names these globals.

    Args:
        function: a function, which may be wrapped by decorators; the copy is not.
        exchanges: by the name of a global that the function calls, what the copy calls.

    Raises:
        TrainerError: the function does not call one of them, or the one that takes its place has
            other parameters; so the library is of a version that mstpass does not know.
    """
    plain = inspect.unwrap(function)
    assert isinstance(plain, types.FunctionType)
    for name, ours in exchanges.items():
        theirs = plain.__globals__.get(name)
        if name not in plain.__code__.co_names or theirs is None:
            raise TrainerError(_unknown(plain, f"it does not call {name}"))
        if list(inspect.signature(theirs).parameters) != list(inspect.signature(ours).parameters):
            raise TrainerError(_unknown(plain, f"{name} has other parameters"))
    copy = types.FunctionType(
        plain.__code__,
        {**plain.__globals__, **exchanges},
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


def _unknown(function: types.FunctionType, reason: str) -> str:
    return (
        f"mstpass does not know this version of {function.__module__}: {reason} in "
        f"{function.__qualname__}. It knows TRL 1.10 to 1.16."
    )
