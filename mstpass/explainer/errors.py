"""What keeps a step from being explained, and what breaks it into graphs, in the user's terms."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mstpass.errors import UserError
from mstpass.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from mstpass.tracing.joint_graphs import NoJointGraph, OptimizerSteps
from mstpass.tracing.names import location

if TYPE_CHECKING:
    from torch._dynamo.output_graph import GraphCompileReason

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')
_RAISED = re.compile(r"got (\w+)\(['\"](.*)['\"]\)\.?$")  # an op, on fake tensors
_NOT_USERS = re.compile(
    r"[/\\]torch[/\\]|[/\\]mstpass[/\\](explainer[/\\]plan_step|tracing[/\\]joint_graphs)\.py$|^<"
)
_ADVICE = {
    "Tensor.backward()": "give the function that returns the loss, and call backward outside of it",
    "autograd.grad": "give the function that returns the loss, and take its gradient outside of it",
    "optimizer": "give the function that returns the loss, and step the optimizer outside of it",
    "Tensor.item()": "keep the value a tensor, or move that line out of the function",
    " and meta": "a tensor on the meta device was not found: give it or its module as an argument",
    "aten.nonzero": "leave tokens out by `ignore_index` or torch.where, not by a mask as index",
    "ata-dependent": "compute both branches with torch.where, or move that line out of the step",
}


class ExplainError(UserError):
    """The step cannot be explained; the message says where, why and what to change."""


def advised(error: NoJointGraph) -> str:
    return (
        f"{error}. Give the function that returns the loss, with parameters or inputs that require "
        "a gradient, outside of torch.no_grad()"
    )


def told(error: Exception) -> str:
    """Where, what, and what to change: of an error of Dynamo's, or of the function's own."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    frames = _FRAME.findall(text.partition("from user code")[2])
    frames = frames or [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    where = _place(frames)
    where = f"{where}: " if where else ""
    if isinstance(error, DynamicOutputShapeException):
        advice = _ADVICE["aten.nonzero"] if "aten.nonzero" in text else _ADVICE["Tensor.item()"]
        return f"{where}{_SIZED_BY_DATA}; {advice}"
    if isinstance(error, DataDependentOutputException):
        return f"{where}{_NEEDS_DATA}; {_ADVICE['Tensor.item()']}"
    what = _what(lines) if lines else type(error).__name__
    context = next((line for line in lines if "raised exception" in line), "")
    if context and "Observed exception" in what:
        what = context.partition("raised exception")[2].strip()
    advice = next((a for key, a in _ADVICE.items() if key in text), "")
    if isinstance(error, torch._dynamo.exc.Unsupported) and not (advice or context):
        advice = (
            "torch.compile breaks the graph here: leave that line out, or have each graph "
            "explained, by mstpass.explain_all, or without --fullgraph"
        )
    plain = isinstance(error, torch._dynamo.exc.TorchDynamoException | OptimizerSteps)
    kind = "" if plain else type(error).__name__
    return f"{where}{kind + ': ' if kind else ''}{what}" + (f"; {advice}" if advice else "")


_SIZED_BY_DATA = "the size of what is computed here depends on data, and nothing is computed"
_NEEDS_DATA = "what runs next depends on the value of a tensor, and nothing is computed"


def _what(lines: list[str]) -> str:
    """The first line, and Dynamo's explanation of it."""
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    raised = _RAISED.search(explanation)
    if raised:
        return f"{raised[1]}: {raised[2]}"
    if explanation:
        return f"{lines[0]} ({explanation.removeprefix('Explanation: ').rstrip('.')})"
    return lines[0]


def _place(frames: list[tuple[str, int | str | None]]) -> str:
    """Of the last frame that is the user's."""
    users = [frame for frame in frames if not _NOT_USERS.search(frame[0])]
    return location(users[-1][0], int(users[-1][1] or 0)) if users else ""


# ---- notes of a report -------------------------------------------------------------------------
def break_note(reason: GraphCompileReason) -> str:
    """Where a graph ends that is not the function's last, why, and what to change."""
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    advice = next((a for key, a in _ADVICE.items() if key in reason.reason), "")
    return f"ends where torch.compile breaks the graph, at {_break(reason)}: {_what(lines)}" + (
        f"; {advice}" if advice else ""
    )


def unbroken(reason: GraphCompileReason) -> str:
    """What helps where a break makes an inner value an output."""
    return f"keep the graph whole: what is read behind its break at {_break(reason)} has to exist"


def _break(reason: GraphCompileReason) -> str:
    return _place([(frame.filename, frame.lineno) for frame in reason.user_stack]) or "a call"


def parts_note(fn: Callable[..., Any]) -> str:
    """Of a function that is not compiled itself."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return (
        f"{name} is not compiled itself: its graphs are those of the compiled functions that it "
        f"calls; compile it, or explain it by mstpass.explain or --fullgraph, for one of all"
    )


def stop_note(error: Exception) -> str:
    """What keeps a function from being explained to its end."""
    return f"what follows is not explained: {told(error)}"
