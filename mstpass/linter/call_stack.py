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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mstpass.torch_internals import dynamo
from mstpass.walk import walk


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
    backward_id = dynamo.current_backward()
    checkpoints: list[CheckpointRun] = []
    modules: list[tuple[nn.Module, types.FrameType]] = []
    modules_inside: int | None = None
    recordable: bool | None = None
    callee: str | None = None
    upkeep = accumulates = False
    function_inputs: list[Any] = []
    for frame in dynamo.frames_from(sys._getframe(1)):
        kind = dynamo.kind_of(frame)
        if kind is dynamo.FrameKind.ENGINE and backward_id is not None:
            caller = frame.f_back
            accumulates = caller is not None and dynamo.kind_of(caller) is dynamo.FrameKind.BACKWARD
            break  # the frames below wait for this backward
        accumulates = accumulates or kind is dynamo.FrameKind.BACKWARD
        if kind is dynamo.FrameKind.MODULE:
            modules.append((dynamo.called_module(frame), frame))
        elif kind is dynamo.FrameKind.REENTRANT_FORWARD:
            recordable = dynamo.records_gradients(frame)
        if modules_inside is None and _runs_autograd_function(frame.f_code):
            function_inputs.append(_arguments(frame))
        run = _checkpoint_run(kind, frame, recordable is not False)
        if run is not None:
            checkpoints.append(run)
            recordable = None
            if modules_inside is None:
                modules_inside, upkeep = len(modules), callee in dynamo.UPKEEP_FILES
        # this frame is in a file of torch's, but it runs the user's function: that is no upkeep
        if kind is not dynamo.FrameKind.REENTRANT_FORWARD:
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
    kind: dynamo.FrameKind | None, frame: types.FrameType, recordable: bool
) -> CheckpointRun | None:
    if kind is dynamo.FrameKind.CHECKPOINT:
        function = dynamo.checkpointed_function(frame, kind)
        return CheckpointRun(frame, function, dynamo.is_reentrant(frame), recordable)
    if kind in (dynamo.FrameKind.RECOMPUTATION, dynamo.FrameKind.REENTRANT_RECOMPUTATION):
        return CheckpointRun(frame, dynamo.checkpointed_function(frame, kind))
    return None


@functools.cache
def _runs_autograd_function(code: types.CodeType) -> bool:
    """Whether it is the forward code of an ``autograd.Function``."""
    functions = walk(torch.autograd.Function.__subclasses__(), lambda cls: cls.__subclasses__())
    return any(code in (_code(f.forward), _code(f.setup_context)) for f in functions)


def _code(function: Any) -> types.CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None)


def _arguments(frame: types.FrameType) -> tuple[Any, ...]:
    """The arguments of the frame's function."""
    args, varargs, keywords, variables = inspect.getargvalues(frame)
    return tuple(variables[n] for n in (*args, varargs, keywords) if n in variables)


def caller_of(frame: types.FrameType) -> types.FrameType:
    """The frame that called ``checkpoint``: the nearest outside of torch's checkpointing code."""
    for outer in dynamo.frames_from(frame.f_back):
        if not dynamo.is_checkpoint_code(outer.f_code.co_filename):
            return outer
    return frame
