"""Messages for the user: why a step cannot be explained, and where torch.compile breaks a graph.

Errors of Dynamo, of fake tensors and of the user's own function become one line: where it happened
in the user's code, what happened, and what to change.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mstpass.errors import UserError
from mstpass.report.graph_ends import RNN_ADVICE
from mstpass.torch_internals.dynamo import GraphCompileReason, TorchDynamoException, Unsupported
from mstpass.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from mstpass.tracing.joint_graphs import NoJointGraph, OptimizerSteps
from mstpass.tracing.names import location

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')
_RAISED_BY_OP = re.compile(r"got (\w+)\(['\"](.*)['\"]\)\.?$")  # by an op on fake tensors
_FILES_OF_TORCH_OR_OURS = re.compile(
    r"[/\\]torch[/\\]|[/\\]mstpass[/\\](explainer[/\\]plan_step|tracing[/\\]joint_graphs)\.py$|^<"
)
_MOVE_LINE = "keep the value a tensor, or move that line out of the function"
_NO_MASK_AS_INDEX = (
    "to leave tokens out, use `ignore_index` or torch.where instead of indexing with a mask"
)
_HOOK_OUT_OF_GRAPHS = (
    "a hook that torch keeps out of graphs, such as FSDP2's around each module that it wraps, ends "
    "the graph here: plan each graph on its own, with mstpass.explain_all or on the command line "
    "without --fullgraph"
)
_NO_GPU_BETWEEN_GRAPHS = (
    "a GPU that is not there makes no tensors between two graphs: make them in the function "
    "`inputs` of the file, or give them as arguments"
)
_ONE_DEVICE = (
    "tensors of the step are on the device that it is planned for, unless the step says otherwise: "
    "leave device='cpu' and .cpu() out of it, or give such tensors as arguments (on the command "
    "line, from the function `inputs` of the file)"
)
_ADVICE = {  # a part of an error's text -> what to change
    "Tensor.backward()": "give the function that returns the loss, and call backward outside of it",
    "autograd.grad": "give the function that returns the loss, and take its gradient outside of it",
    "RNN, GRU, or LSTM": RNN_ADVICE,
    "optimizer": "give the function that returns the loss, and step the optimizer outside of it",
    "Tensor.item()": _MOVE_LINE,
    "logging.Logger method": "do not log there, or have torch leave the call out, with "
    "torch._dynamo.config.ignore_logging_functions; where transformers warns that a model has no "
    "loss_type, set model.loss_type = 'ForCausalLM', as mstpass.compile(model) does",
    "`disable` in file": _HOOK_OUT_OF_GRAPHS,
    "Call to `torch._dynamo.disable()`": _HOOK_OUT_OF_GRAPHS,
    "same device, but found": _ONE_DEVICE,
    " and meta": "no fake tensor stands for a tensor on the meta device: give that tensor, or the "
    "module that holds it, as an argument",
    "from the 'CUDA' backend": _NO_GPU_BETWEEN_GRAPHS,
    "Found no NVIDIA driver": _NO_GPU_BETWEEN_GRAPHS,  # torch built for CUDA
    "aten.nonzero": _NO_MASK_AS_INDEX,
    "ata-dependent": "compute both branches with torch.where, or move that line out of the step",
}
_ABOUT_BUILDS = ". This could be because"  # where torch goes on about builds and lists backends
_SIZE_NEEDS_VALUES = (
    "the size of this result depends on the value of a tensor, and explain computes no values"
)
_BRANCH_NEEDS_VALUES = (
    "what runs next depends on the value of a tensor, and explain computes no values"
)
_GRAPH_BREAK = (
    "torch.compile breaks the graph here: remove that line, or explain each graph on its own, "
    "with mstpass.explain_all or on the command line without --fullgraph"
)


_RAISED = f"where the function runs without torch.compile, {_GRAPH_BREAK}"


class ExplainError(UserError):
    """The step cannot be explained; the message says where, why and what to change."""


def no_backward_message(error: NoJointGraph) -> str:
    return (
        f"{error}. Give the function that returns the loss, and take its gradient outside of it; "
        "its parameters or inputs must require a gradient, and torch.no_grad() must not be on"
    )


def error_message(error: Exception) -> str:
    """Where, what, and what to change, for an error of Dynamo or of the function itself."""
    text = str(error)
    frames = _FRAME.findall(text.partition("from user code")[2])
    frames = frames or [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    place = _user_place(frames)
    what, advice = _what_and_advice(error, text)
    return (f"{place}: " if place else "") + what + (f"; {advice}" if advice else "")


def _what_and_advice(error: Exception, text: str) -> tuple[str, str]:
    if isinstance(error, DynamicOutputShapeException):
        advice = _NO_MASK_AS_INDEX if "aten.nonzero" in text else _MOVE_LINE
        return _SIZE_NEEDS_VALUES, advice
    if isinstance(error, DataDependentOutputException):
        return _BRANCH_NEEDS_VALUES, _MOVE_LINE
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = _first_line(lines) if lines else "no message"
    raised = next((line for line in lines if "raised exception" in line), "")
    if raised and "Observed exception" in what:
        what = raised.partition("raised exception")[2].strip()
    advice = _advice_for(text)
    if isinstance(error, Unsupported) and not advice:
        advice = _RAISED if raised else _GRAPH_BREAK
    if not isinstance(error, TorchDynamoException | OptimizerSteps):
        what = f"{type(error).__name__}: {what.partition(_ABOUT_BUILDS)[0]}"
    return what, advice


def _advice_for(text: str) -> str:
    return next((advice for part, advice in _ADVICE.items() if part in text), "")


def _first_line(lines: list[str]) -> str:
    """The first line of a message, with Dynamo's explanation of it."""
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    raised = _RAISED_BY_OP.search(explanation)
    if raised:
        return f"{raised[1]}: {raised[2]}"
    if explanation:
        return f"{lines[0]} ({explanation.removeprefix('Explanation: ').rstrip('.')})"
    return lines[0]


def _user_place(frames: Sequence[tuple[str, int | str | None]]) -> str:
    """``file.py:12`` of the innermost frame in the user's code; "" if there is none."""
    own = [frame for frame in frames if not _FILES_OF_TORCH_OR_OURS.search(frame[0])]
    return location(own[-1][0], int(own[-1][1] or 0)) if own else ""


# ---- notes of a report -------------------------------------------------------------------------
def graph_break_note(reason: GraphCompileReason) -> str:
    """Where and why torch.compile ends a graph before the function ends, and what to change."""
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    advice = _advice_for(reason.reason)
    place = _user_place([(frame.filename, frame.lineno) for frame in reason.user_stack])
    return (
        f"the graph ends where torch.compile breaks it, at {place or 'a call'}: "
        f"{_first_line(lines)}" + (f"; {advice}" if advice else "")
    )


def callees_note(fn: Callable[..., Any]) -> str:
    """For a function that is not compiled but calls compiled functions."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return (
        f"{name} is not compiled: these are the graphs of the compiled functions that it calls. "
        f"To have one graph, compile {name}, or use mstpass.explain or --fullgraph"
    )


def stopped_note(error: Exception) -> str:
    """Why the rest of a function is not explained."""
    return f"the rest of the function is not explained: {error_message(error)}"
