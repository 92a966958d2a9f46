"""A default device that costs little where Dynamo traces.

``with device:`` enters a mode that gets every call of torch, and looks the function up in a set of
all that make tensors. Dynamo traces that code, and the building of the set, again at each call: two
thirds of the time that it takes to trace a model. Here it does so only at the calls that make
tensors; all others go on as the mode would hand them on.
Source: torch/utils/_device.py, torch/_dynamo/variables/torch_function.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from mstpass.torch_internals.settings import SharedPatch, replaced
from mstpass.torch_internals.versions import find_or_none

_STATE = "torch._dynamo.variables.torch_function.SymbolicTorchFunctionState"
_CALL = f"{_STATE}.call_torch_function_mode(tx, fn, types, args, kwargs)"


class _DefaultDevice(DeviceContext):
    """The mode of our own, told apart from one of the user's, which Dynamo traces as ever."""


@contextmanager
def default_device(device: torch.device) -> Iterator[None]:
    """As ``with device:``."""
    with _calls_handed_on(), _DefaultDevice(device):
        yield


def _handed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """How Dynamo calls the innermost mode."""

    @functools.wraps(original)
    def call(state: Any, tx: Any, fn: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mode = state.mode_stack[-1].realize()
        if not isinstance(mode.value, _DefaultDevice) or _may_make_tensor(fn):
            return original(state, tx, fn, types, args, kwargs)
        with state._pop_mode_for_inlining():
            return fn.call_function(tx, list(args), kwargs)

    return call


def _may_make_tensor(fn: Any) -> bool:
    """Whether a function, as Dynamo knows it, may be one that takes the default device."""
    try:
        return fn.as_python_constant() in _device_constructors()
    except (NotImplementedError, TypeError):  # Dynamo cannot tell, or it has no hash
        return True


def _patch() -> AbstractContextManager[None]:
    original = find_or_none(_CALL)
    if original is None or find_or_none(f"{_STATE}._pop_mode_for_inlining") is None:
        return nullcontext()  # traced as ever, in more time
    name = original.__name__
    return replaced((find_or_none(_STATE), name, _handed_on(original)))


_calls_handed_on = SharedPatch(_patch)
