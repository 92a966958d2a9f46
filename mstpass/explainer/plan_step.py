"""Plan a step without running it: trace it on fake tensors, plan and split its graphs, and report.

The same code as in a compilation makes the same decisions on the same graph. So the report is the
one that ``torch.compile(fn, backend="mst")`` would leave; only Inductor's schedule is not known.

``pareto_points`` is peak against time: the plans that a step would have at other memory budgets.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from mstpass import pipeline
from mstpass.errors import UserError
from mstpass.explainer.errors import (
    ExplainError,
    callees_note,
    error_message,
    graph_break_note,
    no_backward_message,
    stopped_note,
)
from mstpass.frame_stack import with_deep_stack
from mstpass.inductor_hooks import pipeline_kwargs
from mstpass.limit import Limit
from mstpass.memory.device_budget import device_budget_bytes
from mstpass.options import OptionError, Options
from mstpass.passes.runner import PassRunner
from mstpass.plans import Outcome
from mstpass.report.collect_details import collect_details
from mstpass.report.details import ParetoPoint
from mstpass.report.graph_ends import rnn_left_out
from mstpass.report.report import Report
from mstpass.returned_logits import Drop, drop_logits
from mstpass.torch_internals.aot_autograd import traces_backward_again
from mstpass.torch_internals.settings import no_collection_after_tracing
from mstpass.tracing.devices import traced_for
from mstpass.tracing.joint_graphs import (
    Finish,
    NoJointGraph,
    TracedGraphs,
    cause_of,
    trace_each_graph,
    trace_one_graph,
)
from mstpass.tracing.names import modules_near


def explain(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    gpu: str | None = None,
    **kwargs: Any,
) -> Report:
    """What ``torch.compile(fn, backend="mst", options=options)`` would do with a step.

    ``fn(*args, **kwargs)`` is traced on fake tensors and computes nothing. Gradients, random state,
    and what this process has compiled stay as they are. Sizes need not fit in memory: a tensor on
    the meta device stands for one on the default device (on CUDA if there is a GPU). Such tensors
    may be arguments, or be held by modules that ``fn`` is, holds or is given.

    Args:
        fn: returns the loss, as the function given to ``torch.compile`` would; or a module that
            does.
        options: as for ``torch.compile``. A ``report`` path is not written to.
        device: all tensors stand for tensors of this device. ``"cuda"`` needs no GPU.
        gpu: the kind of GPU to plan for, such as ``"a100"``; ``mstpass.gpus`` has the names. None:
            this machine's GPU; where it has none, an H100.

    Raises:
        ExplainError: ``fn`` cannot be traced as one graph, has no backward, or raises an error.
        OptionError: an unknown option or a wrong value.
        UserError: an unknown device or kind of GPU.
    """
    return explain_parts(fn, args, kwargs, options, device=device, gpu=gpu, fullgraph=True)[0]


def explain_all(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    gpu: str | None = None,
    **kwargs: Any,
) -> list[Report]:
    """`explain` for a function that compiles to several graphs: one report for each, in order.

    If ``fn`` is not compiled but calls compiled functions, the reports are those of their graphs,
    whatever backends they have; else ``fn`` itself is compiled. Graphs without a backward have no
    report. A note of each report says where its graph ends if ``fn`` goes on after it; a note of
    the last report says what keeps the rest from being explained.

    ``fn`` runs on fake tensors: nothing is computed, but what ``fn`` prints is printed. It ends
    where it needs the value of a tensor, or where an optimizer steps.

    Raises:
        ExplainError: no graph has a backward, or ``fn`` raises an error before there is one.
        OptionError: an unknown option or a wrong value.
    """
    return explain_parts(fn, args, kwargs, options, device=device, gpu=gpu)


def explain_parts(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    pareto: bool = False,
    device: torch.device | str | None = None,
    gpu: str | None = None,
    left_bytes: Callable[[Sequence[Any]], int] | None = None,
    fullgraph: bool = False,
) -> list[Report]:
    """`explain_all` with ``fn``'s arguments in a sequence and a mapping.

    Args:
        pareto: plan at other budgets as well, for ``Report.details.pareto``.
        left_bytes: what the device has left for the step under the budget ``"auto"``, by the
            graph's inputs; None: what it has left now.
        fullgraph: the report of `explain`, alone.
    """
    kwargs, maker = kwargs or {}, _ReportMaker(options, pareto, left_bytes)
    with _user_errors(fn, args, kwargs), traced_for(device, gpu) as of_tensors, _collector_off():
        _check_arguments(fn, args, kwargs)
        step: Any = (fn, args, kwargs, maker.report, maker.prepare, of_tensors)
        if fullgraph:
            return [with_deep_stack(trace_one_graph, *step)]
        traced: TracedGraphs[Report] = with_deep_stack(trace_each_graph, *step)
    reports = [
        report if graph_break is None else _with_note(report, graph_break_note(graph_break))
        for report, graph_break in traced.parts
    ]
    if left_out := rnn_left_out(modules_near(fn, (*args, *kwargs.values()))):
        reports[0] = _with_note(reports[0], left_out)
    if traced.of_callees:
        reports[0] = _with_note(reports[0], callees_note(fn))
    if traced.stopped_by is not None:
        reports[-1] = _with_note(reports[-1], stopped_note(traced.stopped_by))
    return reports


def _with_note(report: Report, note: str) -> Report:
    return report.with_outcome(notes=(*report.outcome.notes, note))


def _check_arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise `ExplainError` unless ``fn`` can be called with these arguments."""
    if not callable(fn):
        raise ExplainError(f"{fn!r} is not a function: give the one that returns the loss")
    try:
        # Not the signature of what a wrapper wraps: the wrapper may add arguments.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        known = {field.name for field in dataclasses.fields(Options)}
        given = [f"{key!r}: {kwargs[key]!r}" for key in kwargs if key in known]
        hint = f"; give options as options={{{', '.join(given)}}}" if given else ""
        raise ExplainError(f"{name}{signature}: {error}{hint}") from None


@contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage is collected in here, nor by Dynamo behind a trace.

    A trace keeps nearly all that it makes, so that each collection walks over more for nothing.
    """
    with no_collection_after_tracing(), pipeline.collector_paused():
        yield


@contextmanager
def _user_errors(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn every error into one that says in the user's terms what to change."""
    try:
        yield
    except NoJointGraph as error:
        left_out = rnn_left_out(modules_near(fn, (*args, *kwargs.values())))
        message = f"no backward: {left_out}" if left_out else no_backward_message(error)
        raise ExplainError(message) from None
    except (UserError, OptionError):
        raise
    except Exception as error:
        raise ExplainError(error_message(cause_of(error))) from error


class _ReportMaker:
    """Makes the report of a joint graph, after it was given the graph that Dynamo captured.

    The memory budget may depend on the device of that graph's inputs, and ``logits="drop"`` takes
    outputs out of it.

    Args:
        pareto, left_bytes: as of ``explain_parts``.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None,
        pareto: bool = False,
        left_bytes: Callable[[Sequence[Any]], int] | None = None,
    ):
        self._given = Options.parse(options)
        self._pareto = pareto
        self._left_bytes = left_bytes
        self._device_bytes: int | None = None
        self._drop = Drop()

    def prepare(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Finish:
        self._device_bytes = device_budget_bytes(self._given, inputs)
        if self._left_bytes is not None:
            left = self._left_bytes(inputs)
            self._device_bytes = None if self._device_bytes is None else left
        self._drop = drop_logits(gm, self._given)
        return self._drop.finish

    def report(self, module: fx.GraphModule, torch_kwargs: dict[str, Any]) -> Report:
        given, limit = self._given, Limit.of(self._given, self._device_bytes)
        known = pipeline_kwargs(torch_kwargs)
        known["loops_in_backward"] = not traces_backward_again()
        result = pipeline.run(module, given, limit=limit, **known)
        if limit.is_free and (in_bytes := limit.after(result.outcome)) is not None:
            limit = in_bytes
            result = pipeline.run(module, given, limit=limit, **known)
        outcome, runner, details = result.outcome, PassRunner.of(given), None
        with runner.left_out("the picture of the step"):
            details = collect_details(result)
            if details is not None and self._pareto:
                points = _pareto_points(result.outcome, module, given, limit, known)
                details = dataclasses.replace(details, pareto=points)
        refused = (*outcome.rejections, *runner.refused)
        outcome = dataclasses.replace(outcome, rejections=refused)
        return Report(outcome, details=details).with_outcome(**self._drop.added_to(outcome))


BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.1, 0.0)


def _pareto_points(
    at_hand: Outcome,
    module: fx.GraphModule,
    options: Options,
    limit: Limit,
    known: Mapping[str, Any],
) -> tuple[ParetoPoint, ...]:
    """The plan at hand and plans at ``BUDGETS``, the highest peak first."""
    outcomes: dict[object, Outcome] = {_budget_of(limit, options): at_hand}
    for share in BUDGETS:
        if share not in outcomes:
            result = pipeline.run(module, options, limit=Limit(share), **known)
            outcomes[share] = result.outcome
    points = [
        ParetoPoint(
            f"memory_budget={budget}", found.peak_bytes, found.extra_time, chosen=found is at_hand
        )
        for budget, found in outcomes.items()
        if found.peak_bytes is not None and found.extra_time is not None
    ]
    return tuple(sorted(points, key=lambda point: (-point.peak_bytes, point.extra_time)))


def _budget_of(limit: Limit, options: Options) -> object:
    """The budget of the plan at hand, as a user writes it."""
    if limit.share is not None:
        return limit.share
    return limit.budget_bytes if options.memory_budget == "auto" else options.memory_budget
