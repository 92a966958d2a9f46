"""The plan of a step, without running it: traced on fake tensors, planned, split, and reported.

What a compilation would decide is decided by the same code on the same graph, so the report is the
one that ``torch.compile(fn, backend="mst")`` would leave, peaks of the final graphs included.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass import pipeline
from mstpass.device import with_device_budget
from mstpass.explainer.pareto import pareto_points
from mstpass.extras import UserError
from mstpass.options import OptionError, Options
from mstpass.report.build import details_of
from mstpass.report.report import Report
from mstpass.trace import NoJointGraph, cause_of, trace_joint

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')
_RAISED = re.compile(r"got (\w+)\(['\"](.*)['\"]\)\.?$")  # an op, on fake tensors
_TORCH = re.compile(r"[/\\]torch[/\\]")


class ExplainError(UserError):
    """The step cannot be explained; the message says where, why and what to change."""


def explain(
    fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """What ``torch.compile(fn, backend="mst", options=options)`` would do with a step.

    ``fn(*args, **kwargs)`` is traced on fake tensors and computes nothing; gradients, random state,
    and what this process has compiled stay as they are. Sizes need not fit in memory: tensors on
    the meta device, in the arguments and in the modules that ``fn`` is, holds or is given, stand
    for ones of the default device (of CUDA where there is a GPU).

    Args:
        fn: returns the loss, as the function given to ``torch.compile`` would; a module, too.
        options: as for ``torch.compile``. A ``report`` path is not written to.

    Raises:
        ExplainError: ``fn`` does not trace as one graph, has no backward, or raises itself.
        OptionError: a wrong option.
    """
    return explain_step(fn, args, kwargs, options)


def explain_step(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    pareto: bool = False,
) -> Report:
    """`explain`, whose keyword arguments are all ``fn``'s.

    Args:
        pareto: plan at other budgets as well, for ``Report.details.pareto``.
    """
    given = Options.parse(options)
    chosen = [given]

    def with_budget(inputs: Sequence[Any]) -> None:
        chosen[0] = with_device_budget(given, inputs)

    def take(module: fx.GraphModule, torch_kwargs: dict[str, Any]) -> Report:
        result = _planned(module, chosen[0], torch_kwargs)
        details = details_of(result)
        if details is not None and pareto:
            points = pareto_points(result, module, chosen[0], torch_kwargs["num_fwd_outputs"])
            details = dataclasses.replace(details, pareto=points)
        return Report(result.outcome, details=details)

    if not callable(fn):
        raise ExplainError(f"{fn!r} is not a function: give the one that returns the loss")
    try:
        return trace_joint(fn, args, kwargs or {}, take, with_budget)
    except (UserError, OptionError) as error:
        raise ExplainError(_advised(error)) if isinstance(error, NoJointGraph) else error from None
    except Exception as error:
        raise ExplainError(_told(cause_of(error))) from error


def _planned(
    module: fx.GraphModule, options: Options, torch_kwargs: dict[str, Any]
) -> pipeline.Result:
    known = ("num_fwd_outputs", "static_lifetime_input_indices")
    return pipeline.run(
        module, options, **{name: torch_kwargs[name] for name in known if name in torch_kwargs}
    )


# ---- errors ------------------------------------------------------------------------------------
_ADVICE = {
    "Tensor.backward()": "give the function that returns the loss, and call backward outside of it",
    "autograd.grad": "give the function that returns the loss, and take its gradient outside of it",
    "optimizer": "give the function that returns the loss, and step the optimizer outside of it",
    "Tensor.item()": "keep the value a tensor, or move that line out of the function",
    " and meta": "a tensor on the meta device was not found: give it or its module as an argument",
    "ata-dependent": "compute both branches with torch.where, or move that line out of the step",
}


def _advised(error: NoJointGraph) -> str:
    return (
        f"{error}. Give the function that returns the loss, with parameters or inputs that require "
        "a gradient, outside of torch.no_grad()"
    )


def _told(error: Exception) -> str:
    """Where, what, and what to change: of an error of Dynamo's, or of the function's own."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    frames = _FRAME.findall(text.partition("from user code")[2])
    own = [f for f in frames if not _TORCH.search(f[0]) and not f[0].endswith("mstpass/trace.py")]
    where = f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}: " if own else ""
    what = lines[0] if lines else type(error).__name__
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    context = next((line for line in lines if "raised exception" in line), "")
    raised = _RAISED.search(explanation)
    if "Observed exception" in what and context:
        what = context.partition("raised exception")[2].strip()
    elif raised:
        what = f"{raised[1]}: {raised[2]}"
    elif explanation:
        what += f" ({explanation.removeprefix('Explanation: ').rstrip('.')})"
    advice = next((a for key, a in _ADVICE.items() if key in text), "")
    if isinstance(error, torch._dynamo.exc.Unsupported) and not (advice or context):
        advice = (
            "torch.compile breaks the graph here, and a step is explained as one graph: leave that "
            "line out, or explain the part that holds the loss"
        )
    kind = "" if isinstance(error, torch._dynamo.exc.TorchDynamoException) else type(error).__name__
    return f"{where}{kind + ': ' if kind else ''}{what}" + (f"; {advice}" if advice else "")
