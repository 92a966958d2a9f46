"""The backend: the function that ``torch.compile(..., backend="mst")`` calls.

Inductor compiles the graph as usual, with four of its hooks set:

- ``custom_partitioner_fn`` receives the joint graph and returns forward and backward;
- ``post_grad_custom_post_pass`` lowers the loops, after Inductor's cache keys are computed;
- ``_pre_fusion_custom_pass`` lets kernels keep the names of what loops have written;
- ``_post_fusion_custom_pass`` reads Inductor's schedule. If the schedule needs more memory than a
  budget in bytes allows, the graph is planned and compiled again with a lower limit.

On a CUDA device ``memory_budget="auto"`` is ``"free"``, in all that it does. Only if that plan does
not fit, by the simulated peak or by the schedule's, the graph is compiled with a budget in bytes.

All other hooks, and what the user put into these four, work as without this backend.

An error of mstpass never stops the user's program: Inductor compiles the graph alone, with one
warning (``strict=True`` raises instead). docs/faults.md lists what may happen, with the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.captured import Captured, PlannedFor, of_all_ranks, why_not_alike
from mstpass.hook_checks import FUSION_HOOK, SCHEDULE_HOOK, check_calls
from mstpass.inductor_hooks import (
    DoesNotFitError,
    LowerLoops,
    MstpassError,
    Partitioner,
    check_fit,
    failed,
    uuid,
    warn_of,
)
from mstpass.limit import Limit
from mstpass.memory.device_budget import device_budget_bytes, watch_optimizers
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.options import OptionError, Options
from mstpass.out_of_memory import Compiled, CompiledPlan, Make, with_leaner_plans
from mstpass.partition.solve import BudgetError, missed_budgets, over_budget
from mstpass.passes.runner import PassRunner
from mstpass.plans_by_length import plans_by_length
from mstpass.report import store
from mstpass.report.graph_ends import lost, warn_of_budget, with_graph_ends, without_plan
from mstpass.report.report import Report, ReportFileError
from mstpass.returned_logits import Drop, drop_logits
from mstpass.torch_internals.aot_autograd import (
    CompiledFunctions,
    backwards_may_keep_graphs,
    has_backward_hooks,
    traces_backward_again,
)
from mstpass.torch_internals.batch_sizes import (
    TracingContext,
    fake_inputs,
    preserve_rng_state,
    tracing,
)
from mstpass.torch_internals.caches import cache_counts
from mstpass.torch_internals.dynamo import RestartAnalysis
from mstpass.torch_internals.inductor import compile_fx
from mstpass.torch_internals.plain_inductor import by_inductor_alone, options_of_mode
from mstpass.torch_internals.scheduler_mends import MendScheduler
from mstpass.torch_internals.settings import (
    backward_compiled_at_once,
    inductor_setting,
    is_inductor_setting,
    without_padding,
)
from mstpass.torch_internals.versions import installed, warn_if_newer

log = logging.getLogger(__name__)

# Inductor keeps a freed buffer for a later one of equal size if its own estimate of the peak allows
# it. That estimate leaves out what a loop needs inside and the workspace of attention.
_OURS = {"allow_buffer_reuse": False}
_MORE_ROUNDS = 3


def mst(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured, with its large parts running in chunks of tokens.

    Args:
        gm: the graph.
        example_inputs: its (fake) inputs.
        kwargs: ``options`` (a mapping) and ``mode`` (of Inductor), as given to ``torch.compile``.

    Raises:
        OptionError: an option has an unknown name or a bad value.
        MstpassError: an error of mstpass, under ``strict``.
    """
    warn_if_newer(installed())
    options = Options.parse(kwargs.get("options"))
    users = {**options_of_mode(kwargs.get("mode")), **options.inductor_patches}
    drop = _drop(gm, options)
    graph = Captured(gm, tuple(example_inputs), users, options, drop)
    return drop.finish(_compile(graph))


def _drop(gm: fx.GraphModule, options: Options) -> Drop:
    """The logits that the graph no longer returns; none, if finding them fails."""
    try:
        return drop_logits(gm, options)
    except Exception as error:
        if options.strict:
            raise MstpassError(f"mstpass failed (strict=True): {error}") from error
        warn_of(error, "kept the logits that the step returns")
        return Drop()


def _compile(graph: Captured) -> Callable[..., Any]:
    """The compiled graph; by Inductor alone if mstpass fails."""
    try:
        return _planned(graph)
    except (RestartAnalysis, OptionError):
        raise
    except Exception as error:
        if graph.options.strict:
            raise
        # If Inductor cannot compile the graph either, its own error says why.
        untouched = by_inductor_alone(graph.module, graph.inputs, graph.users)
        warn_of(error)
        store.keep(Report(failed(error)))
        return untouched


def _planned(graph: Captured) -> Callable[..., Any]:
    """The compiled graph, with a plan for each range of sizes where they are symbolic.

    What the device has left is asked once, so that all plans of a graph have the same limit.
    """
    watch_optimizers()
    device_bytes = device_budget_bytes(graph.options, graph.inputs)
    if device_bytes is not None:
        device_bytes = of_all_ranks(device_bytes, graph.inputs)
    compile_one = functools.partial(_fitting, device_bytes)
    if (by_length := plans_by_length(graph, compile_one)) is not None:
        return by_length
    again = _again(graph)  # before the first compilation, which may change what is recorded
    return with_leaner_plans(compile_one(graph), graph, again)


def _again(graph: Captured) -> Make | None:
    """Compiles a graph of static sizes again, for less memory; None where that is not possible."""
    context = TracingContext.try_get()
    if context is None or any(isinstance(x, torch.SymInt) for x in graph.inputs):
        return None
    try:
        inputs = tuple(fake_inputs(graph.module, graph.inputs))
    except LookupError as why:
        log.debug("no leaner plan: %s", why)
        return None
    least = PlannedFor(must_fit=True)
    fake = dataclasses.replace(graph.of_this_rank(), inputs=inputs, planned_for=least)

    def make(limit: Limit, _: Sequence[Any]) -> CompiledPlan:
        with tracing(context), preserve_rng_state():
            return _compiled_and_reported(fake, limit)

    return make


def _fitting(device_bytes: int | None, graph: Captured, limit: Limit | None = None) -> CompiledPlan:
    """The compiled graph, by the plan that fits on the device, or by one within a limit."""
    try:
        return _compiled_and_reported(graph, limit or Limit.of(graph.options, device_bytes))
    except DoesNotFitError:
        if limit is not None or device_bytes is None:
            raise
    return _compiled_and_reported(graph, Limit.in_bytes(device_bytes))


def _compiled_and_reported(
    graph: Captured, limit: Limit, notes: tuple[str, ...] = ()
) -> CompiledPlan:
    """The compiled graph, whose report is kept.

    Args:
        notes: what the report says besides.

    Raises:
        DoesNotFitError: the free plan needs more than the device has left.
    """
    options, drop = graph.options, graph.drop
    salt = uuid(options, limit, not traces_backward_again(), graph.planned_for) + drop.salt
    key = store.graph_key(graph.module, graph.inputs, salt)
    stored, cached = _stored(key)
    at_last = limit
    if stored:
        check_fit(stored[-1].outcome, limit)
        at_last = limit.with_simulated(stored[-1].outcome.limit_bytes)
    partitioner = Partitioner(options, at_last, cached, graph.planned_for)
    try:
        compiled = _compiled(graph, partitioner)
    except Exception:
        if options.strict and partitioner.report is not None:  # the plan may say why
            store.keep(partitioner.report, partitioner.seconds, partitioner.pass_seconds)
        raise
    report = partitioner.report
    if report is None:  # the graph came from a compile cache
        if why := why_not_alike(graph, stored[-1] if stored else None):
            return _without_repeated_collectives(graph, limit, why)
        stored = stored or [lost()]
        for earlier in stored:
            store.keep(earlier)
        return CompiledPlan(*compiled, at_last, _held_to_budget(stored[-1], graph, limit, key))
    if limit.is_free and limit.budget_bytes is not None:
        store.remember(report, key)  # for later processes: the cache has the graph from now on
    if not report.outcome.no_plan:
        check_fit(report.outcome, limit)
        compiled, partitioner = _within_budget(graph, compiled, partitioner)
        report = partitioner.report or report
    report = report.with_outcome(**drop.added_to(report.outcome))
    report = _held_to_budget(report, graph, limit, key)
    if why := why_not_alike(graph, report):
        store.remember(report, key)  # with the graph in the cache: another time ranks may agree
        return _without_repeated_collectives(graph, limit, why)
    report = report.with_outcome(notes=(*report.outcome.notes, *notes))
    with PassRunner.of(options).left_out("where this graph ends"):
        report = with_graph_ends(report, graph.module, graph.inputs)
    store.add_nested(partitioner.nested, key)
    store.add(report, key, partitioner.seconds, partitioner.pass_seconds)
    _write_reports([*partitioner.nested, report], options)
    return CompiledPlan(*compiled, partitioner.limit, report)


def _held_to_budget(report: Report, graph: Captured, limit: Limit, key: str) -> Report:
    """The report, with what is to be said of a budget in bytes that the compiled graph exceeds.

    Args:
        key: of the graph, which the compile cache has: so its report is remembered.

    Raises:
        DoesNotFitError: the graph is to be planned for other sizes.
        MstpassError: the budget is exceeded, under ``strict``.
    """
    over = over_budget(report.outcome, limit)
    by_simulation = missed_budgets(report.outcome.notes)
    notes = tuple(note for note in report.outcome.notes if note not in by_simulation)
    report = report.with_outcome(notes=(*notes, over) if over else notes)
    if not over:
        return report
    if not report.cached:
        store.remember(report, key)
    has_plan = not report.outcome.no_plan
    if has_plan and graph.planned_for.must_fit:
        raise DoesNotFitError
    if graph.options.strict:
        raise MstpassError(f"mstpass failed (strict=True): {over}") from BudgetError(over)
    warn_of_budget(report.outcome, limit.budget_bytes, over)
    return report


def _without_repeated_collectives(graph: Captured, limit: Limit, why: str) -> CompiledPlan:
    note = f"backward repeats no collective, which takes more memory: {why}"
    return _compiled_and_reported(graph.of_this_rank(), limit, (note,))


def _stored(key: str) -> tuple[list[Report], bool]:
    """The reports of a graph in the compile cache, its own last, and whether the cache is asked.

    The cache does not know by which limit a graph was planned; the report does. So where the report
    is broken, the graph is compiled anew.
    """
    try:
        own = store.recall(key)
        return [*store.recall_nested(key), own] if own is not None else [], True
    except ReportFileError as error:
        warnings.warn(f"mstpass compiles a cached graph anew: {error}", stacklevel=2)
        return [], False


def _write_reports(reports: Sequence[Report], options: Options) -> None:
    """Write reports to the path of the option ``report``; nothing, without one."""
    if options.report is None:
        return
    try:
        for report in reports:
            store.write(report, options.report)
    except Exception as error:
        said = f"mstpass cannot write report={options.report!r}: {type(error).__name__}: {error}"
        if options.strict:
            raise MstpassError(said) from error
        warnings.warn(said, stacklevel=2)


_Compiled = tuple[Compiled, CompiledFunctions]  # and the autograd functions that run its backward


def _compiled(graph: Captured, partitioner: Partitioner) -> _Compiled:
    """Compile with our hooks. Then the partitioner has a report, unless a cache had the graph."""
    users, takes_time = graph.users, not partitioner.limit.is_free
    mender = MendScheduler(_users_hook(FUSION_HOOK, users))
    reader = ReadSchedule(_users_hook(SCHEDULE_HOOK, users))
    cached = all(hook.uuid() is not None for hook in (partitioner, mender, reader))
    users_pass = _users_hook("post_grad_custom_post_pass", users)
    lowering = LowerLoops(users_pass, takes_time, partitioner, cached)
    hooks = {"custom_partitioner_fn": partitioner, "post_grad_custom_post_pass": lowering}
    of_scheduler = {FUSION_HOOK: mender, SCHEDULE_HOOK: reader}
    hooks |= {name: hook for name, hook in of_scheduler.items() if is_inductor_setting(name)}
    # Compile the backward now: if it failed at its first call, nothing could fall back any more.
    now = not has_backward_hooks(graph.inputs)
    patches = {**_OURS, **without_padding(), **users, **hooks}
    before = cache_counts()
    at_once = backward_compiled_at_once() if now else contextlib.nullcontext()
    with at_once, backwards_may_keep_graphs() as functions:
        compiled: Any = compile_fx(graph.module, list(graph.inputs), config_patches=patches)
    counts = cache_counts().since(before)
    check_calls(partitioner, lowering, mender, reader, counts)
    if partitioner.report is None and not counts.hits:
        partitioner.report = without_plan(graph.module, graph.inputs)
    if partitioner.report is not None and reader.peak_bytes is not None:
        partitioner.report = partitioner.report.with_outcome(scheduled_peak_bytes=reader.peak_bytes)
    return compiled, functions


def _within_budget(
    graph: Captured, compiled: _Compiled, partitioner: Partitioner
) -> tuple[_Compiled, Partitioner]:
    """Compile again with lower limits while Inductor's schedule needs more than the budget.

    The last round, of a plan that saves less, is taken where the best schedule needs more than was
    simulated and no budget is met.

    Returns the round of the lowest peak: a plan of a lower simulated peak may need as much as the
    one before once Inductor has scheduled it.
    """
    options, limit = partitioner.options, partitioner.limit
    latest = best = partitioner.report
    assert latest is not None and best is not None, "the plan at hand has a report"
    rounds = range(1, _MORE_ROUNDS + 1)
    for number in (*rounds, None):
        lower = None
        if number is not None:
            planned = limit.with_simulated(latest.outcome.limit_bytes)
            lower = planned.after(latest.outcome, last=number == _MORE_ROUNDS)
        elif options.may_choose:
            lower = limit.without_savings(best.outcome)
        if lower is None:
            continue
        tighter = Partitioner(options, lower, planned_for=graph.planned_for)
        try:
            again = _compiled(graph, tighter)
        except Exception as error:  # what is compiled already works
            if options.strict:
                raise
            warn_of(error)
            break
        if tighter.report is None:
            break
        latest = tighter.report
        if _is_lower(latest, best):
            compiled, partitioner, best = again, tighter, latest
    return compiled, partitioner


def _is_lower(report: Report, other: Report) -> bool:
    ours, theirs = report.peak_bytes, other.peak_bytes
    return ours is not None and theirs is not None and ours < theirs


def _users_hook(name: str, patches: dict[str, Any]) -> Any:
    return patches.get(name, inductor_setting(name))


__all__ = ["MstpassError", "OptionError", "mst"]
