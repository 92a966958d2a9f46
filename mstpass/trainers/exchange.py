"""What a trainer runs, and how one function of it uses another one, for this trainer alone."""

from __future__ import annotations

import types
from typing import Any

from mstpass.errors import UserError


class TrainerError(UserError, ValueError):
    """A trainer cannot be compiled as it is set up; the message says what to change."""


def computes_loss(trainer: Any) -> Any:
    """The class whose ``compute_loss`` the trainer has."""
    return next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))


def loss_besides_model(trainer: Any) -> str:
    """What computes the loss from the model's outputs; empty if the model computes it."""
    if trainer.label_smoother is not None:
        return "label_smoothing_factor"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    kind = computes_loss(trainer)
    return "" if kind.__module__ == "transformers.trainer" else f"{kind.__name__}.compute_loss"


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
