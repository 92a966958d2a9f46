"""What Dynamo compiles and why its graphs end, and the frames of a step on the Python stack.

``explain`` traces functions and leaves Dynamo as it was: of the code objects that Dynamo compiled
meanwhile, which the bytecode hook tells, it resets those that hold nothing else.

The linter asks for each op in which modules and checkpoints it runs. Nothing is patched for that:
``Module._call_impl`` and the functions of ``torch.utils.checkpoint`` have frames of their own, and
their local variables tell the rest.

Source: torch/_dynamo/convert_frame.py, output_graph.py, exc.py; torch/csrc/dynamo/eval_frame.c;
torch/nn/modules/module.py, torch/utils/checkpoint.py, torch/autograd/graph.py,
torch/csrc/autograd/engine.cpp.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException, Unsupported
from torch._dynamo.output_graph import GraphCompileReason
from torch.autograd import function as autograd_function
from torch.utils import checkpoint as torch_checkpoint

from mstpass.torch_internals.versions import expect, find

__all__ = [
    "GraphCompileReason",
    "RestartAnalysis",
    "TorchDynamoException",
    "Unsupported",
    "maybe_mark_dynamic",
    "register_bytecode_hook",
]

# They repeat what an error says, or warn of what only matters in a real run.
TRACING_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.variables.ctx_manager",
)

EAGER, FAIL = "eager_on_recompile", "fail_on_recompile"  # stances under which nothing is compiled


def graph_break_after(gm: fx.GraphModule) -> GraphCompileReason | None:
    """Why a graph that Dynamo captured ends before its function does; None where it does not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason if isinstance(reason, GraphCompileReason) and reason.graph_break else None


def compiles_rnns() -> bool:
    """Whether graphs may hold the calls of ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``."""
    return torch._dynamo.config.allow_rnn


def forget_backend(code: types.CodeType, backend: Callable[..., Any]) -> None:
    """Drop what Dynamo keeps of a code object, unless another backend compiled it as well."""
    if all(entry.backend is backend for entry in _debug_get_cache_entry_list(code)):
        reset_code(code)


# ---- frames --------------------------------------------------------------------------------------
def frames_from(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class FrameKind(enum.Enum):
    MODULE = "a module is called"
    CHECKPOINT = "a function is checkpointed, in the forward"
    RECOMPUTATION = "backward recomputes a checkpoint that is not reentrant"
    REENTRANT_FORWARD = "a reentrant checkpoint runs its function"
    REENTRANT_RECOMPUTATION = "backward recomputes a reentrant checkpoint"
    BACKWARD = "torch.autograd.backward, which fills .grad"
    ENGINE = "a backward runs; below are the frames of who waits for it"


# From 2.15 on, checkpoints work in functions of their own, which decorators call as well.
_WITHOUT_REENTRANT = (
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl(fn)"
    " | torch.utils.checkpoint._checkpoint_without_reentrant_generator(fn)"
)
_FUNCTIONS = {
    FrameKind.MODULE: "torch.nn.Module._call_impl",
    FrameKind.CHECKPOINT: "torch.utils.checkpoint._checkpoint_impl(function, use_reentrant)"
    " | torch.utils.checkpoint.checkpoint(function, use_reentrant)",
    FrameKind.REENTRANT_FORWARD: "torch.utils.checkpoint.CheckpointFunction.forward(ctx)",
    FrameKind.REENTRANT_RECOMPUTATION: "torch.utils.checkpoint.CheckpointFunction.backward(ctx)",
    FrameKind.BACKWARD: "torch.autograd.backward",
    FrameKind.ENGINE: "torch.autograd.graph._engine_run_backward",
}
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
    codes = {kind: _code(api) for kind, api in _FUNCTIONS.items()}
    codes[FrameKind.RECOMPUTATION] = _recompute_code()
    return {id(code): kind for kind, code in codes.items()}


def _code(api: str) -> types.CodeType:
    return inspect.unwrap(find(api)).__code__


def _recompute_code() -> types.CodeType:
    inner = _code(_WITHOUT_REENTRANT).co_consts
    codes = [c for c in inner if isinstance(c, types.CodeType) and c.co_name == "recompute_fn"]
    expect(len(codes) == 1, f"{_WITHOUT_REENTRANT} has no function recompute_fn")
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


def current_node() -> object:
    """The node of autograd's graph whose backward runs in this thread; None in the forward."""
    return torch._C._current_autograd_node()


def stance() -> str:
    """How ``torch.compiler.set_stance`` wants calls to be treated that need a compilation."""
    return torch._dynamo.eval_frame._stance.stance


def compiles_nothing() -> bool:
    """Whether the stance forbids to compile."""
    return stance() in (EAGER, FAIL)


def is_checkpoint_code(filename: str) -> bool:
    """Whether a file of torch's stands between ``checkpoint`` and who calls it."""
    return filename in _between()


@functools.cache
def _between() -> frozenset[str | None]:
    modules = (torch_checkpoint, autograd_function, torch._compile, torch._dynamo.eval_frame)
    return frozenset(module.__file__ for module in modules)
