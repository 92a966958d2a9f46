"""Runs a function of a model inside of the forward of what wraps the model.

DDP and FSDP prepare parameters and gradients in hooks around ``wrapper.forward``, which ends in a
call of the module. A graph of Dynamo ends there as well. A function that calls the module, and is
called in the module's place, has both: the hooks around it, and one graph inside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def unwrapped(model: Any) -> Any:
    """The innermost module under DDP and `torch.compile`; `model` itself if nothing wraps it."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def call_inside(wrapper: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(module, *args, **kwargs)`` in the place of the module's call by its wrapper."""
    module = unwrapped(wrapper)
    if not isinstance(getattr(wrapper, "_orig_mod", wrapper), nn.parallel.DistributedDataParallel):
        return function(module, *args, **kwargs)
    own = vars(module).get("forward")

    def instead(*args: Any, **kwargs: Any) -> Any:
        restore()
        return function(module, *args, **kwargs)

    def restore() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            module.forward = own

    module.forward = instead
    try:
        return getattr(wrapper, "_orig_mod", wrapper)(*args, **kwargs)
    finally:
        restore()
