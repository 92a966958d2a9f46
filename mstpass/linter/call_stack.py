"""Where an op runs, read off the Python stack: in which modules, which checkpoints, which phase.

No hook is set and nothing is patched: ``Module._call_impl``, the functions of
``torch.utils.checkpoint`` and the ``forward`` of an ``autograd.Function`` have frames of their own,
and these hold what we want to know. That works in autograd's threads as well, and where an
exception ends a recomputation early. (``Function.apply`` has no frame since torch 2.15: it is C++.)

Terms: a *region* is one call of ``checkpoint``; an op is *recomputed* when it runs in backward
inside a region or a module, and a *gradient op* when it runs in backward outside of both.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mstpass.torch_internals.checkpoint_frames import (
    UPKEEP_FILES,
    FrameKind,
    called_module,
    checkpointed_function,
    current_backward,
    frames_from,
    is_checkpoint_code,
    is_reentrant,
    kind_of,
    records_gradients,
)


@dataclass(frozen=True)
class Region:
    """A call of ``checkpoint`` that is running.

    Attributes:
        frame: its frame; two runs of one call have two.
        function: what was given to ``checkpoint``.
        reentrant: None in a recomputation, where it is not needed.
        recordable: False where a reentrant checkpoint runs without gradients: nothing will ever be
            recomputed for it. (That a non-reentrant one does so shows in its ops' grad mode.)
    """

    frame: types.FrameType
    function: Any
    reentrant: bool | None = None
    recordable: bool = True


@dataclass(frozen=True)
class Place:
    """Where one op runs. Regions and modules come innermost first.

    Attributes:
        backward_id: the running backward, None in the forward.
        modules: each with its frame.
        inside: how many of the modules run inside the innermost region.
        hand_written: what autograd functions within the innermost region were called with; their
            kernels may read it unseen.
        upkeep: a checkpoint issued the op for itself: it saves inputs, or restores a generator.
        accumulates: a backward that fills ``.grad`` issued it, not ``autograd.grad``. In a thread
            of autograd's that does not show; the gradient of the loss, made before, still does.
    """

    backward_id: int | None
    regions: tuple[Region, ...]
    modules: tuple[tuple[nn.Module, types.FrameType], ...]
    inside: int
    hand_written: tuple[Any, ...] = ()
    upkeep: bool = False
    accumulates: bool = False

    @property
    def recomputed(self) -> bool:
        return self.backward_id is not None and bool(self.regions or self.modules)

    @property
    def gradient(self) -> bool:
        return self.backward_id is not None and not self.recomputed


def current_place() -> Place:
    """Of the op that is being dispatched."""
    backward_id = current_backward()
    regions: list[Region] = []
    modules: list[tuple[nn.Module, types.FrameType]] = []
    inside: int | None = None
    recordable: bool | None = None
    callee: str | None = None
    upkeep = accumulates = False
    hand_written: list[Any] = []
    for frame in frames_from(sys._getframe(1)):
        kind = kind_of(frame)
        if kind is FrameKind.ENGINE and backward_id is not None:
            caller = frame.f_back
            accumulates = caller is not None and kind_of(caller) is FrameKind.BACKWARD
            break  # what lies below waits for this backward
        accumulates = accumulates or kind is FrameKind.BACKWARD
        if kind is FrameKind.MODULE:
            modules.append((called_module(frame), frame))
        elif kind is FrameKind.REENTRANT_FORWARD:
            recordable = records_gradients(frame)
        if inside is None and _is_hand_written(frame.f_code):
            hand_written.append(_arguments(frame))
        region = _region(kind, frame, recordable is not False)
        if region is not None:
            regions.append(region)
            recordable = None
            if inside is None:
                inside, upkeep = len(modules), callee in UPKEEP_FILES
        # A reentrant checkpoint runs its function there, a non-reentrant one does so itself.
        if kind is not FrameKind.REENTRANT_FORWARD:
            callee = frame.f_code.co_filename
    return Place(
        backward_id,
        tuple(regions),
        tuple(modules),
        len(modules) if inside is None else inside,
        tuple(hand_written),
        upkeep,
        accumulates,
    )


def _region(kind: FrameKind | None, frame: types.FrameType, recordable: bool) -> Region | None:
    if kind is FrameKind.CHECKPOINT:
        function = checkpointed_function(frame, kind)
        return Region(frame, function, is_reentrant(frame), recordable)
    if kind in (FrameKind.RECOMPUTATION, FrameKind.REENTRANT_RECOMPUTATION):
        return Region(frame, checkpointed_function(frame, kind))
    return None


_hand_written: dict[types.CodeType, bool] = {}


def _is_hand_written(code: types.CodeType) -> bool:
    """Whether it is what an ``autograd.Function`` runs in the forward."""
    known = _hand_written.get(code)
    if known is None:
        functions = _subclasses(torch.autograd.Function)
        known = any(code in (_code(f.forward), _code(f.setup_context)) for f in functions)
        _hand_written[code] = known
    return known


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _code(function: Any) -> types.CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None)


def _arguments(frame: types.FrameType) -> tuple[Any, ...]:
    """What the frame's function was called with."""
    code, variables = frame.f_code, frame.f_locals
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    return tuple(variables[name] for name in names if name in variables)


def caller_of(frame: types.FrameType) -> types.FrameType:
    """Who called ``checkpoint``: the nearest frame outside of torch's own checkpointing code."""
    for outer in frames_from(frame.f_back):
        if not is_checkpoint_code(outer.f_code.co_filename):
            return outer
    return frame
