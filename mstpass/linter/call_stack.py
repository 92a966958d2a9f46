"""Reads from the Python stack where an op runs: its modules, its checkpoints, and its phase.

No hook is set and nothing is patched. A call of a module, of ``torch.utils.checkpoint`` or of the
``forward`` of an ``autograd.Function`` has a frame on the stack, whose variables tell which module
or function it runs. This also works in autograd's threads, and where an exception ends a
recomputation early. (``Function.apply`` has no frame where it is C++.)

An op in the backward is *recomputed* if it runs inside a checkpoint or a module; otherwise it is a
*gradient op*.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mstpass.torch_internals.dynamo import (
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
class CheckpointRun:
    """A call of ``checkpoint`` that is running, in the forward or recomputed in the backward.

    Attributes:
        frame: its frame; each run has another one.
        function: the function that is checkpointed.
        reentrant: whether the checkpoint is reentrant; None in a recomputation.
        recordable: False if a reentrant checkpoint runs without gradients, so that it is never
            recomputed. (For a non-reentrant checkpoint, the grad mode of its ops shows that.)
    """

    frame: types.FrameType
    function: Any
    reentrant: bool | None = None
    recordable: bool = True


@dataclass(frozen=True)
class OpContext:
    """Where an op runs.

    Attributes:
        backward_id: identifies the running backward; None in the forward.
        checkpoints: the checkpoints around the op, the innermost first.
        modules: the modules around the op, the innermost first, each with its frame.
        modules_inside: how many of the modules run inside of the innermost checkpoint.
        function_inputs: the inputs of autograd functions inside of the innermost checkpoint; their
            kernels may read them unseen.
        upkeep: whether a checkpoint itself issued the op, to save inputs or to restore a generator.
        accumulates: whether a backward that fills ``.grad`` issued the op, not ``autograd.grad``.
            In autograd's threads this is not seen, but it is for the gradient of the loss, which
            the calling thread makes.
    """

    backward_id: int | None
    checkpoints: tuple[CheckpointRun, ...]
    modules: tuple[tuple[nn.Module, types.FrameType], ...]
    modules_inside: int
    function_inputs: tuple[Any, ...] = ()
    upkeep: bool = False
    accumulates: bool = False

    @property
    def recomputed(self) -> bool:
        return self.backward_id is not None and bool(self.checkpoints or self.modules)

    @property
    def gradient(self) -> bool:
        return self.backward_id is not None and not self.recomputed


def current_context() -> OpContext:
    """The context of the op that is being dispatched."""
    backward_id = current_backward()
    checkpoints: list[CheckpointRun] = []
    modules: list[tuple[nn.Module, types.FrameType]] = []
    modules_inside: int | None = None
    recordable: bool | None = None
    callee: str | None = None
    upkeep = accumulates = False
    function_inputs: list[Any] = []
    for frame in frames_from(sys._getframe(1)):
        kind = kind_of(frame)
        if kind is FrameKind.ENGINE and backward_id is not None:
            caller = frame.f_back
            accumulates = caller is not None and kind_of(caller) is FrameKind.BACKWARD
            break  # the frames below wait for this backward
        accumulates = accumulates or kind is FrameKind.BACKWARD
        if kind is FrameKind.MODULE:
            modules.append((called_module(frame), frame))
        elif kind is FrameKind.REENTRANT_FORWARD:
            recordable = records_gradients(frame)
        if modules_inside is None and _runs_autograd_function(frame.f_code):
            function_inputs.append(_arguments(frame))
        run = _checkpoint_run(kind, frame, recordable is not False)
        if run is not None:
            checkpoints.append(run)
            recordable = None
            if modules_inside is None:
                modules_inside, upkeep = len(modules), callee in UPKEEP_FILES
        # this frame is in a file of torch's, but it runs the user's function: that is no upkeep
        if kind is not FrameKind.REENTRANT_FORWARD:
            callee = frame.f_code.co_filename
    return OpContext(
        backward_id,
        tuple(checkpoints),
        tuple(modules),
        len(modules) if modules_inside is None else modules_inside,
        tuple(function_inputs),
        upkeep,
        accumulates,
    )


def _checkpoint_run(
    kind: FrameKind | None, frame: types.FrameType, recordable: bool
) -> CheckpointRun | None:
    if kind is FrameKind.CHECKPOINT:
        function = checkpointed_function(frame, kind)
        return CheckpointRun(frame, function, is_reentrant(frame), recordable)
    if kind in (FrameKind.RECOMPUTATION, FrameKind.REENTRANT_RECOMPUTATION):
        return CheckpointRun(frame, checkpointed_function(frame, kind))
    return None


@functools.cache
def _runs_autograd_function(code: types.CodeType) -> bool:
    """Whether it is the forward code of an ``autograd.Function``."""
    functions = _subclasses(torch.autograd.Function)
    return any(code in (_code(f.forward), _code(f.setup_context)) for f in functions)


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _code(function: Any) -> types.CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None)


def _arguments(frame: types.FrameType) -> tuple[Any, ...]:
    """The arguments of the frame's function."""
    args, varargs, keywords, variables = inspect.getargvalues(frame)
    return tuple(variables[n] for n in (*args, varargs, keywords) if n in variables)


def caller_of(frame: types.FrameType) -> types.FrameType:
    """The frame that called ``checkpoint``: the nearest outside of torch's checkpointing code."""
    for outer in frames_from(frame.f_back):
        if not is_checkpoint_code(outer.f_code.co_filename):
            return outer
    return frame
