"""Where an op runs, read off the Python stack: in which modules, which checkpoints, which phase.

No hook is set and nothing is patched: ``Module._call_impl``, the functions of
``torch.utils.checkpoint`` and the ``forward`` of an ``autograd.Function`` have frames of their own,
and these hold what we want to know. That works in autograd's threads as well, and where an
exception ends a recomputation early. (``Function.apply`` has no frame since torch 2.15: it is C++.)

Terms: a *region* is one call of ``checkpoint``; an op is *recomputed* when it runs in backward
inside a region or a module, and a *gradient op* when it runs in backward outside of both.

Private names of torch, checked with torch 2.11, 2.13 and 2.15: ``_call_impl``,
``_engine_run_backward``, ``CheckpointFunction``, ``checkpoint`` (from 2.15 on ``_checkpoint_impl``,
which decorated functions call as well), ``recompute_fn`` in
``_checkpoint_without_reentrant_generator`` (from 2.15 on ``..._impl``), the local names read below,
and ``torch._C._current_graph_task_id``.
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
from torch.autograd import function as autograd_function
from torch.autograd import graph
from torch.utils import checkpoint as torch_checkpoint

_NO_BACKWARD = -1  # what _current_graph_task_id gives outside of every backward


def _implementation(name: str, public: Any) -> types.CodeType:
    """The code that does the work: since torch 2.15 a function of its own, called by the public."""
    return inspect.unwrap(getattr(torch_checkpoint, name, public)).__code__


def _recompute_code() -> types.CodeType:
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    outer = _implementation("_checkpoint_without_reentrant_generator_impl", generator)
    inner = (c for c in outer.co_consts if isinstance(c, types.CodeType))
    return next(code for code in inner if code.co_name == "recompute_fn")


_MODULE = id(nn.Module._call_impl.__code__)
_ENGINE = id(graph._engine_run_backward.__code__)
_BACKWARD = id(torch.autograd.backward.__code__)
_CHECKPOINT = id(_implementation("_checkpoint_impl", torch_checkpoint.checkpoint))
_REENTRANT_FORWARD = id(torch_checkpoint.CheckpointFunction.forward.__code__)
_REENTRANT_BACKWARD = id(torch_checkpoint.CheckpointFunction.backward.__code__)
_RECOMPUTE = id(_recompute_code())
_UPKEEP_FILES = {torch_checkpoint.__file__, torch.random.__file__, None}
_OWN_FILES = {
    module.__file__
    for module in (torch_checkpoint, autograd_function, torch._compile, torch._dynamo.eval_frame)
}


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
    task = torch._C._current_graph_task_id()
    regions: list[Region] = []
    modules: list[tuple[nn.Module, types.FrameType]] = []
    inside: int | None = None
    recordable: bool | None = None
    callee: str | None = None
    upkeep = accumulates = False
    hand_written: list[Any] = []
    for frame in _frames(sys._getframe(1)):
        kind = id(frame.f_code)
        if kind == _ENGINE and task != _NO_BACKWARD:
            caller = frame.f_back
            accumulates = caller is not None and id(caller.f_code) == _BACKWARD
            break  # what lies below waits for this backward
        accumulates = accumulates or kind == _BACKWARD
        if kind == _MODULE:
            modules.append((frame.f_locals["self"], frame))
        elif kind == _REENTRANT_FORWARD:
            # filled in before forward runs, and empty where no gradient is recorded
            recordable = bool(frame.f_locals["ctx"].next_functions)
        if inside is None and _is_hand_written(frame.f_code):
            hand_written.append(_arguments(frame))
        region = _region(kind, frame, recordable is not False)
        if region is not None:
            regions.append(region)
            recordable = None
            if inside is None:
                inside, upkeep = len(modules), callee in _UPKEEP_FILES
        if kind != _REENTRANT_FORWARD:  # it runs the function, as a non-reentrant one does itself
            callee = frame.f_code.co_filename
    return Place(
        None if task == _NO_BACKWARD else task,
        tuple(regions),
        tuple(modules),
        len(modules) if inside is None else inside,
        tuple(hand_written),
        upkeep,
        accumulates,
    )


def _region(kind: int, frame: types.FrameType, recordable: bool) -> Region | None:
    if kind == _CHECKPOINT:
        variables = frame.f_locals
        return Region(frame, variables["function"], bool(variables["use_reentrant"]), recordable)
    if kind == _RECOMPUTE:
        return Region(frame, frame.f_locals["fn"])
    if kind == _REENTRANT_BACKWARD:
        return Region(frame, frame.f_locals["ctx"].run_function)
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
    for outer in _frames(frame.f_back):
        if outer.f_code.co_filename not in _OWN_FILES:
            return outer
    return frame


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
