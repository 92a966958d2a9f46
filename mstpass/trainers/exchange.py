"""Exchanges what a function of another library uses, in a copy of it, for one object alone."""

from __future__ import annotations

import types
from typing import Any

from mstpass.errors import UserError


class TrainerError(UserError, ValueError):
    """A trainer cannot be compiled as it is set up; the message says what to change."""


def with_globals(function: types.FunctionType, exchanges: dict[str, Any]) -> types.FunctionType:
    """A copy of a function, for which these names of its module stand for something else.

    Raises:
        KeyError: the function does not use one of the names, so it is not the one that is known.
    """
    for name in exchanges:
        if name not in function.__code__.co_names or name not in function.__globals__:
            raise KeyError(name)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **exchanges},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
