"""The plan of a step, without running it: traced on fake tensors, planned, split, and reported.

What a compilation would decide is decided by the same code on the same graph, so the report is the
one that ``torch.compile(fn, backend="mst")`` would leave, peaks of the final graphs included.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._dynamo.output_graph import GraphCompileReason

from mstpass import pipeline
from mstpass.errors import UserError
from mstpass.explainer.errors import (
    ExplainError,
    advised,
    break_note,
    parts_note,
    stop_note,
    told,
    unbroken,
)
from mstpass.explainer.pareto import pareto_points
from mstpass.memory.device_budget import with_device_budget
from mstpass.options import OptionError, Options
from mstpass.regions.advice import is_output
from mstpass.report.collect_details import collect_details
from mstpass.report.report import Report
from mstpass.tracing.joint_graphs import NoJointGraph, Take, cause_of, trace_each, trace_joint


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
    with _told():
        planner = _planner(options, pareto)
        return trace_joint(_checked(fn, args, kwargs or {}), args, kwargs or {}, *planner)


def explain_all(
    fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> list[Report]:
    """`explain` of a function that compiles to several graphs: a report of each, in their order.

    What ``torch.compile(fn, backend="mst", options=options)`` would do, where something breaks the
    graph; and what the compiled functions do that a function calls which is not compiled itself,
    whatever their backends. A note of each report says where its graph ends, if ``fn`` goes on; of
    the last, what keeps the rest from being explained. Graphs without a backward have no report.

    ``fn`` runs, on fake tensors, so that nothing is computed: what it prints is printed. It ends
    where it needs the value of a tensor, or an optimizer steps.

    Raises:
        ExplainError: no graph has a backward, or ``fn`` raises before there is one.
        OptionError: a wrong option.
    """
    return explain_parts(fn, args, kwargs, options)


def explain_parts(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    pareto: bool = False,
) -> list[Report]:
    """`explain_all`, whose keyword arguments are all ``fn``'s; the rest as in `explain_step`."""
    with _told():
        planner = _planner(options, pareto)
        traced = trace_each(_checked(fn, args, kwargs or {}), args, kwargs or {}, *planner)
    reports = [
        _broken(report, reason) if reason is not None else report for report, reason in traced.parts
    ]
    if traced.of_callees:
        reports[0] = _noted(reports[0], parts_note(fn))
    if traced.stopped is not None:
        reports[-1] = _noted(reports[-1], stop_note(traced.stopped))
    return reports


def _broken(report: Report, reason: GraphCompileReason) -> Report:
    """Of a graph that ends by a break: that is why it has the outputs that it has."""
    rejections = tuple(
        dataclasses.replace(r, fix=unbroken(reason)) if is_output(r.reason) else r
        for r in report.rejections
    )
    return _noted(report.with_outcome(rejections=rejections), break_note(reason))


def _noted(report: Report, note: str) -> Report:
    return report.with_outcome(notes=(*report.outcome.notes, note))


def _checked(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """``fn``, which these arguments fit."""
    if not callable(fn):
        raise ExplainError(f"{fn!r} is not a function: give the one that returns the loss")
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapper may give them
    except (TypeError, ValueError):  # of what is not written in Python
        return fn
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        known = {field.name for field in dataclasses.fields(Options)}
        given = [f"{key!r}: {kwargs[key]!r}" for key in kwargs if key in known]
        hint = f"; options are given as options={{{', '.join(given)}}}" if given else ""
        raise ExplainError(f"{name}{signature}: {error}{hint}") from None
    return fn


@contextmanager
def _told() -> Iterator[None]:
    """Errors in the user's terms."""
    try:
        yield
    except NoJointGraph as error:
        raise ExplainError(advised(error)) from None
    except (UserError, OptionError):
        raise
    except Exception as error:
        raise ExplainError(told(cause_of(error))) from error


def _planner(
    options: Mapping[str, Any] | None, pareto: bool
) -> tuple[Take[Report], Callable[[Sequence[Any]], None]]:
    """What makes a report of a joint graph; and what is to have the graph's inputs before."""
    given = Options.parse(options)
    chosen = [given]

    def with_budget(inputs: Sequence[Any]) -> None:
        chosen[0] = with_device_budget(given, inputs)

    def take(module: fx.GraphModule, torch_kwargs: dict[str, Any]) -> Report:
        result = _planned(module, chosen[0], torch_kwargs)
        details = collect_details(result)
        if details is not None and pareto:
            points = pareto_points(result, module, chosen[0], torch_kwargs["num_fwd_outputs"])
            details = dataclasses.replace(details, pareto=points)
        return Report(result.outcome, details=details)

    return take, with_budget


def _planned(
    module: fx.GraphModule, options: Options, torch_kwargs: dict[str, Any]
) -> pipeline.Result:
    known = ("num_fwd_outputs", "static_lifetime_input_indices")
    return pipeline.run(
        module, options, **{name: torch_kwargs[name] for name in known if name in torch_kwargs}
    )
