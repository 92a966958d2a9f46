"""Tells transformers where no sequences are packed, so that it builds no causal mask.

A model of transformers computes its positions itself where its caller gives none, 0, 1, ..., N - 1.
Then its sequences are not packed, and its causal mask is what attention's flag ``is_causal`` says.
In eager mode transformers sees that in the values of the positions. Under ``torch.compile`` it
cannot look at them, takes packed sequences for possible, and builds a mask of N x N; and it repeats
the heads of keys and values, because its kernels take a mask or grouped heads, not both.

Here a compiled model's caller says whether it gives positions, for as long as the call lasts and
for its thread. Two functions of ``transformers.masking_utils`` listen to that:

``find_packed_sequence_indices``   finds no packed sequences in positions that all sequences share
``is_torchdynamo_exporting``       is False, so transformers leaves a mask out where a flag will
                                   do. Dynamo takes it for True before torch 2.14

With positions, with an attention mask, with a filled cache, or with a window that is no longer than
the sequence, both do what they did, and so they do in every other call. The model, its config and
its attention stay as they are. Models that join text with other inputs number their positions by
what the inputs are, so they are left alone.

Source: transformers 5.24, masking_utils.py. There is no interface for them, so they are exchanged;
where a version has others, nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

_FIND, _EXPORTS = "find_packed_sequence_indices", "is_torchdynamo_exporting"


class _Caller(threading.local):
    """What the caller of a compiled model has said; of each thread its own."""

    def __init__(self) -> None:
        self.gives_no_positions = False  # Dynamo of torch 2.11 reads no value beside a class's own


_caller = _Caller()


def says_whether_packed(
    model: Any, function: Callable[..., Any], signature_of: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, made to tell transformers whether its caller gives positions to the model.

    Args:
        model: what the function calls; anything but a model of text of transformers is left alone.
        function: takes the model's arguments, by themselves or in a mapping (a batch).
        signature_of: has the function's parameters.
    """
    if not _is_text_model(model) or not prepare():
        return function
    parameters = inspect.signature(signature_of).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _said(not _gives_positions(names, args, kwargs)):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def no_positions_given(model: Any) -> Iterator[None]:
    """A context in which the model is called without positions, as `says_whether_packed` sees."""
    with _said(_is_text_model(model) and prepare()):
        yield


@contextlib.contextmanager
def _said(gives_no_positions: bool) -> Iterator[None]:
    before = _caller.gives_no_positions
    _caller.gives_no_positions = gives_no_positions
    try:
        yield
    finally:
        _caller.gives_no_positions = before


def _gives_positions(names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    for batch in args:
        if isinstance(batch, Mapping):
            given.update(batch)
    unknown = len(args) > len(names)
    return unknown or any(
        str(name).endswith("position_ids") and value is not None for name, value in given.items()
    )


def _is_text_model(model: Any) -> bool:
    """Whether this is a model of transformers, or PEFT's around one, that takes text alone."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return False
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if not isinstance(base, library.PreTrainedModel):
        return False
    text = getattr(base.config, "get_text_config", None)
    return text is not None and text() is base.config


def prepare() -> bool:
    """Let transformers listen; False where it is not built as in the versions that are known."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None:
        return False
    try:
        _exchange(masking)
    except Exception as error:  # a version that is built differently
        log.info("transformers builds a mask for each compiled model: %s", error)
        return False
    return True


def _exchange(masking: ModuleType) -> None:
    own, exports = getattr(masking, _FIND), getattr(masking, _EXPORTS)
    if hasattr(own, "of_mstpass"):
        return
    if list(inspect.signature(own).parameters) != ["position_ids"]:
        raise TypeError(f"{_FIND} has other parameters")

    @functools.wraps(own)
    def find(position_ids: Any) -> Any:
        shared = position_ids.stride(0) == 0 or position_ids.shape[0] == 1
        return None if _caller.gives_no_positions and shared else own(position_ids)

    find.of_mstpass = True  # type: ignore[attr-defined]
    setattr(masking, _FIND, find)
    setattr(masking, _EXPORTS, lambda: not _caller.gives_no_positions and exports())
