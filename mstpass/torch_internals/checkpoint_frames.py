"""Recognize the frames of modules, checkpoints and backward passes on the Python stack.

The linter asks for each op in which modules and checkpoints it runs. Nothing is patched for that:
``Module._call_impl`` and the functions of ``torch.utils.checkpoint`` have frames of their own, and
their local variables tell the rest. Source: torch/nn/modules/module.py, torch/utils/checkpoint.py,
torch/autograd/graph.py, torch/csrc/autograd/engine.cpp.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import function as autograd_function
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as torch_checkpoint

from mstpass.torch_internals.dispatch_modes import TorchDispatchMode
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch.nn.Module._call_impl",
        "torch.autograd.graph._engine_run_backward",
        "torch.autograd.backward",
        "torch.utils.checkpoint._checkpoint_impl(function, use_reentrant)"
        " | torch.utils.checkpoint.checkpoint(function, use_reentrant)",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl(fn)"
        " | torch.utils.checkpoint._checkpoint_without_reentrant_generator(fn)",
        "torch.utils.checkpoint.CheckpointFunction.forward(ctx)",
        "torch.utils.checkpoint.CheckpointFunction.backward(ctx)",
        "torch._C._current_graph_task_id",
    ),
)


class FrameKind(enum.Enum):
    MODULE = "a module is called"
    CHECKPOINT = "a function is checkpointed, in the forward"
    RECOMPUTATION = "backward recomputes a checkpoint that is not reentrant"
    REENTRANT_FORWARD = "a reentrant checkpoint runs its function"
    REENTRANT_RECOMPUTATION = "backward recomputes a reentrant checkpoint"
    BACKWARD = "torch.autograd.backward, which fills .grad"
    ENGINE = "a backward runs; below are the frames of who waits for it"


# A checkpoint's own ops, which save inputs and restore random states, are issued from these.
UPKEEP_FILES = frozenset({torch_checkpoint.__file__, torch.random.__file__, None})


def kind_of(frame: types.FrameType) -> FrameKind | None:
    """What the frame is, where it is one of torch's.

    Raises:
        TorchChangedError: torch has no such frames.
    """
    return _kinds().get(id(frame.f_code))


@functools.cache
def _kinds() -> Mapping[int, FrameKind]:
    """By the ``id`` of the code: a code's own hash is made of all its bytes."""
    APIS.require()
    reentrant = torch_checkpoint.CheckpointFunction
    codes = {
        FrameKind.MODULE: nn.Module._call_impl.__code__,
        FrameKind.CHECKPOINT: _implementation("checkpoint", "_checkpoint_impl"),
        FrameKind.RECOMPUTATION: _recompute_code(),
        FrameKind.REENTRANT_FORWARD: reentrant.forward.__code__,
        FrameKind.REENTRANT_RECOMPUTATION: reentrant.backward.__code__,
        FrameKind.BACKWARD: torch.autograd.backward.__code__,
        FrameKind.ENGINE: autograd_graph._engine_run_backward.__code__,
    }
    return {id(code): kind for kind, code in codes.items()}


def _implementation(name: str, name_from_2_15: str) -> types.CodeType:
    """From 2.15 on the work is done in functions of their own, which decorators call as well."""
    function = getattr(torch_checkpoint, name_from_2_15, None) or getattr(torch_checkpoint, name)
    return inspect.unwrap(function).__code__


def _recompute_code() -> types.CodeType:
    name = "_checkpoint_without_reentrant_generator"
    inner = _implementation(name, f"{name}_impl").co_consts
    codes = [c for c in inner if isinstance(c, types.CodeType) and c.co_name == "recompute_fn"]
    APIS.expect(len(codes) == 1, f"torch.utils.checkpoint.{name} has no function recompute_fn")
    return codes[0]


def called_module(frame: types.FrameType) -> nn.Module:
    """Of a frame of the kind MODULE."""
    return frame.f_locals["self"]


def checkpointed_function(frame: types.FrameType, kind: FrameKind) -> Any:
    """What was given to ``checkpoint``; of a frame of the kind CHECKPOINT or a recomputation."""
    if kind is FrameKind.CHECKPOINT:
        return frame.f_locals["function"]
    if kind is FrameKind.RECOMPUTATION:
        return frame.f_locals["fn"]
    return frame.f_locals["ctx"].run_function


def is_reentrant(frame: types.FrameType) -> bool:
    """Of a frame of the kind CHECKPOINT."""
    return bool(frame.f_locals["use_reentrant"])


def records_gradients(frame: types.FrameType) -> bool:
    """Of a frame of the kind REENTRANT_FORWARD, which itself runs without them.

    The edges to the functions behind it are set before forward runs; without gradients it has none.
    """
    return bool(frame.f_locals["ctx"].next_functions)


def current_backward() -> int | None:
    """A number for the backward that runs in this thread; None in the forward."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def is_checkpoint_code(filename: str) -> bool:
    """Whether a file of torch's stands between ``checkpoint`` and who calls it."""
    return filename in _between()


@functools.cache
def _between() -> frozenset[str | None]:
    modules = (torch_checkpoint, autograd_function, torch._compile, torch._dynamo.eval_frame)
    return frozenset(module.__file__ for module in modules)


# ---- probe -------------------------------------------------------------------------------------
class _Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()  # of a sine alone nothing would be recomputed but its operand


class _Stacks(TorchDispatchMode):
    """The kinds of frames that each sine is computed in, innermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[list[FrameKind]] = []
        self.functions: list[Any] = []
        self.backwards: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default:
            self._see()
        return func(*args, **(kwargs or {}))

    def _see(self) -> None:
        self.backwards.append(current_backward())
        self.kinds.append([])
        for frame in frames_from(sys._getframe(1)):
            kind = kind_of(frame)
            if kind is not None:
                self.kinds[-1].append(kind)
            if kind in _HAVE_FUNCTIONS:
                self.functions.append(checkpointed_function(frame, kind))


_HAVE_FUNCTIONS = (
    FrameKind.CHECKPOINT,
    FrameKind.RECOMPUTATION,
    FrameKind.REENTRANT_RECOMPUTATION,
)


def frames_from(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def probe() -> None:
    APIS.require()
    kind = FrameKind
    backward = [kind.ENGINE, kind.BACKWARD]
    for reentrant, expected in (
        (False, [[kind.MODULE, kind.CHECKPOINT], [kind.MODULE, kind.RECOMPUTATION, *backward]]),
        (
            True,
            [
                [kind.MODULE, kind.REENTRANT_FORWARD, kind.CHECKPOINT],
                [kind.MODULE, kind.REENTRANT_RECOMPUTATION, *backward],
            ],
        ),
    ):
        module, x = _Sine(), torch.ones(2, requires_grad=True)
        with _Stacks() as stacks:
            torch_checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        names = [[kind.name for kind in kinds] for kinds in stacks.kinds]
        APIS.expect(stacks.kinds == expected, f"checkpointed ops run in the frames {names}")
        functions = all(function is module for function in stacks.functions)
        APIS.expect(functions, "frames of checkpoints do not tell what is checkpointed")
        known = [number is not None for number in stacks.backwards]
        APIS.expect(known == [False, True], "torch._C._current_graph_task_id tells no backward")
