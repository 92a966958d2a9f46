"""The backend: the function that ``torch.compile(..., backend="mst")`` calls.

Inductor compiles the graph as usual, with three of its hooks set:

- ``custom_partitioner_fn`` receives the joint graph and returns forward and backward;
- ``post_grad_custom_post_pass`` lowers the loops, after Inductor's cache keys are computed;
- ``_post_fusion_custom_pass`` reads Inductor's schedule. If the schedule needs more memory than a
  budget in bytes allows, the graph is planned and compiled again with a lower limit.

On a CUDA device ``memory_budget="auto"`` is ``"free"``, in all that it does. Only if that plan does
not fit, by the simulated peak or by the schedule's, the graph is compiled with a budget in bytes.

All other hooks, and what the user put into these three, work as without this backend.

An error of mstpass never stops the user's program: the unchanged joint graph goes to torch's own
partitioner, with one warning (``strict=True`` raises instead).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass import pipeline
from mstpass.graph import device_costs
from mstpass.loops.lowering import lower_loops
from mstpass.memory.device_budget import device_budget_bytes, watch_optimizers
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.options import OptionError, Options
from mstpass.partition.budget import BudgetError, fits, over_budget, tighter_limit_bytes
from mstpass.plans import Outcome, Rejection
from mstpass.problem.solver_registry import is_own
from mstpass.regions.advice import with_fix
from mstpass.report import store
from mstpass.report.collect_details import collect_details
from mstpass.report.details import Details
from mstpass.report.report import Report
from mstpass.returned_logits import Drop, drop_logits
from mstpass.schedule.attention_masks import materialize_masks
from mstpass.schedule.delay_embedding_gradient import delay_scatters
from mstpass.schedule.delay_recomputation import delay_recomputation, recomputation_waits
from mstpass.torch_internals.compile_fx import (
    CustomGraphPass,
    CustomPartitionerFn,
    compile_fx,
    options_of_mode,
)
from mstpass.torch_internals.compiler_collectives import least_of_ranks
from mstpass.torch_internals.donated_buffers import keep_safe_donations
from mstpass.torch_internals.partitioners import (
    merge_equal_nodes,
    min_cut_rematerialization_partition,
)
from mstpass.torch_internals.scheduler_dependencies import mutations_kept
from mstpass.torch_internals.settings import (
    backward_compiled_at_once,
    inductor_setting,
    without_padding,
)

log = logging.getLogger(__name__)

# Inductor keeps a freed buffer for a later one of equal size if its own estimate of the peak allows
# it. That estimate leaves out what a loop needs inside and the workspace of attention.
_OURS = {"allow_buffer_reuse": False}
_MORE_ATTEMPTS = 3


class MstpassError(RuntimeError):
    """A failure inside mstpass, raised only under ``strict=True``."""


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
    watch_optimizers()
    options = Options.parse(kwargs.get("options"))
    drop = _drop(gm, options)
    return drop.finish(_compile(gm, example_inputs, kwargs.get("mode"), options, drop))


def _drop(gm: fx.GraphModule, options: Options) -> Drop:
    """The logits that the graph no longer returns; none, if finding them fails."""
    try:
        return drop_logits(gm, options)
    except Exception as error:
        if options.strict:
            raise MstpassError(f"mstpass failed (strict=True): {error}") from error
        _warn_of(error, "kept the logits that the step returns")
        return Drop()


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Options,
    drop: Drop,
) -> Callable[..., Any]:
    """The compiled graph, by the plan that fits on the device."""
    users = {**options_of_mode(mode), **options.inductor_patches}
    available_bytes = device_budget_bytes(options, example_inputs)
    if available_bytes is None:
        return _compiled_and_reported(gm, example_inputs, users, options, drop)
    available_bytes = least_of_ranks(available_bytes)
    free = dataclasses.replace(options, memory_budget="free")
    with contextlib.suppress(_DoesNotFitError):
        return _compiled_and_reported(gm, example_inputs, users, free, drop, available_bytes)
    in_bytes = dataclasses.replace(options, memory_budget=available_bytes)
    return _compiled_and_reported(gm, example_inputs, users, in_bytes, drop)


class _DoesNotFitError(Exception):
    """The plan needs more memory than the device has left."""


def _compiled_and_reported(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    users: dict[str, Any],
    options: Options,
    drop: Drop,
    available_bytes: int | None = None,
) -> Callable[..., Any]:
    """The compiled graph, whose report is kept; or the graph by Inductor alone, if mstpass fails.

    Raises:
        _DoesNotFitError: the step needs more than ``available_bytes``.
    """
    key = store.graph_key(gm, example_inputs, uuid(options) + drop.salt)
    stored = store.recall(key)  # of a graph that comes from the compile cache
    if stored is not None:
        _check_fit(stored.outcome, available_bytes)
    limit_bytes = stored.outcome.limit_bytes if stored is not None else None
    partitioner = Partitioner(options, limit_bytes, available_bytes)
    try:
        compiled = _compiled(gm, example_inputs, users, partitioner)
    except _DoesNotFitError:
        raise
    except Exception as error:
        if options.strict or not partitioner.chunked:
            if partitioner.report is not None:  # the plan may say why
                store.keep(partitioner.report, partitioner.seconds)
            raise
        _warn_of(error)
        store.add(Report(_failed(error)), key)
        untouched: Any = compile_fx(gm, list(example_inputs), config_patches=users)
        return untouched
    report = partitioner.report
    if report is None:
        if stored is not None:
            store.keep(stored)
        return compiled
    if available_bytes is not None:
        store.remember(report, key)  # for later processes: the cache has the graph from now on
    _check_fit(report.outcome, available_bytes)
    compiled, report = _within_budget(gm, example_inputs, users, options, compiled, report)
    report = report.with_outcome(**drop.added_to(report.outcome))
    over = over_budget(report.outcome, options)
    if over:
        if options.strict:
            raise MstpassError(f"mstpass failed (strict=True): {over}") from BudgetError(over)
        warnings.warn(f"mstpass: {over}", stacklevel=2)
        report = report.with_outcome(notes=(*report.outcome.notes, over))
    store.add(report, key, options.report, partitioner.seconds)
    return compiled


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    users: dict[str, Any],
    partitioner: Partitioner,
) -> Any:
    """Compile with our hooks. Then the partitioner has a report, unless a cache had the graph."""
    hold = partitioner.options.frees_memory_for_time
    reader = ReadSchedule(_users_hook("_post_fusion_custom_pass", users))
    hooks = {
        "custom_partitioner_fn": partitioner,
        "post_grad_custom_post_pass": LowerLoops(
            _users_hook("post_grad_custom_post_pass", users), hold
        ),
        "_post_fusion_custom_pass": reader,
    }
    # Compile the backward now: if it failed at its first call, nothing could fall back any more.
    patches = {**_OURS, **without_padding(), **users, **hooks}
    with backward_compiled_at_once(), mutations_kept():
        compiled = compile_fx(gm, list(example_inputs), config_patches=patches)
    if partitioner.report is not None and reader.peak_bytes is not None:
        partitioner.report = partitioner.report.with_outcome(scheduled_peak_bytes=reader.peak_bytes)
    return compiled


def _within_budget(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    users: dict[str, Any],
    options: Options,
    compiled: Any,
    report: Report,
) -> tuple[Any, Report]:
    """Compile again with lower limits while Inductor's schedule needs more than the budget.

    Returns the attempt of the lowest peak: a plan of a lower simulated peak may need as much as
    the one before once Inductor has scheduled it.
    """
    latest = report
    for attempt in range(_MORE_ATTEMPTS):
        limit = tighter_limit_bytes(latest.outcome, options, last=attempt == _MORE_ATTEMPTS - 1)
        if limit is None:
            break
        tighter = Partitioner(options, limit)
        try:
            again = _compiled(gm, example_inputs, users, tighter)
        except Exception as error:  # what is compiled already works
            if options.strict:
                raise
            _warn_of(error)
            break
        if tighter.report is None:
            break
        latest = tighter.report
        if _is_lower(latest, report):
            compiled, report = again, latest
    return compiled, report


def _is_lower(report: Report, other: Report) -> bool:
    ours, theirs = report.peak_bytes, other.peak_bytes
    return ours is not None and theirs is not None and ours < theirs


def _warn_of(error: Exception, done: str = "left it to Inductor: the step has no chunks") -> None:
    warnings.warn(
        f"mstpass failed on a graph and {done}. {type(error).__name__}: {error}. "
        "Please report the error that options={'strict': True} raises.",
        stacklevel=3,
    )
    log.debug("mstpass failed", exc_info=error)


def _failed(error: Exception) -> Outcome:
    reason = f"{type(error).__name__}: {error}"
    return Outcome(rejections=(with_fix(Rejection("error", "graph", reason)),))


def _check_fit(outcome: Outcome, available_bytes: int | None) -> None:
    if available_bytes is not None and not fits(outcome, available_bytes):
        raise _DoesNotFitError


def _users_hook(name: str, patches: dict[str, Any]) -> Any:
    return patches.get(name, inductor_setting(name))


@functools.cache
def _sources_hash() -> str:
    """A hash of all our sources: a changed pass must not get graphs that an older one compiled."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def uuid(options: Options) -> str:
    """A cache key of all that decides a plan besides the graph: sources, options, stored costs."""
    return f"mstpass-{_sources_hash()}-{options.fingerprint()}-{device_costs.fingerprint()}"


class Partitioner(CustomPartitionerFn):
    """The partitioner that AOTAutograd calls with the joint graph.

    Attributes:
        limit_bytes: the highest simulated peak that the plan may have (``pipeline.run``).
        available_bytes: the memory of the device; a plan that needs more is an error.
        report: the plan of the graph; None until the partitioner is called. It is not called for a
            graph that comes from a compile cache.
        seconds: the time that each stage of the pipeline took.
    """

    def __init__(
        self,
        options: Options,
        limit_bytes: int | None = None,
        available_bytes: int | None = None,
    ):
        self.options, self.limit_bytes = options, limit_bytes
        self.available_bytes = available_bytes
        self.report: Report | None = None
        self.seconds: Mapping[str, float] = {}

    @property
    def chunked(self) -> bool:
        return self.report is not None and bool(self.report.regions)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        merge_equal_nodes(gm)
        try:
            known = pipeline_kwargs(kwargs)
            result = pipeline.run(gm, self.options, limit_bytes=self.limit_bytes, **known)
            assert result.modules is not None
        except Exception as error:
            if self.options.strict:
                raise MstpassError(f"mstpass failed (strict=True): {error}") from error
            _warn_of(error)
            self.report = Report(_failed(error))
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        _check_fit(result.outcome, self.available_bytes)
        self.report = Report(result.outcome, details=self._details(result))
        self.seconds = result.seconds
        return result.modules

    def _details(self, result: pipeline.Result) -> Details | None:
        """What pictures are drawn from; None on an error, which must not stop a compilation."""
        try:
            return collect_details(result)
        except Exception:
            if self.options.strict:
                raise
            log.debug("mstpass has no details of this graph", exc_info=True)
            return None

    def uuid(self) -> str | None:
        # None means not cacheable: a user's solver may change while its name stays
        if not is_own(self.options.solver):
            return None
        return f"{uuid(self.options)}-{self.limit_bytes}"


def pipeline_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What ``pipeline.run`` takes of the arguments that AOTAutograd gives to a partitioner."""
    names = ("num_fwd_outputs", "static_lifetime_input_indices")
    return {name: kwargs[name] for name in names if name in kwargs}


class LowerLoops(CustomGraphPass):
    """Inductor's last graph pass over forward and backward: our lowering, then the user's pass."""

    def __init__(self, users_pass: Any, hold: bool):
        self.users_pass, self.hold = users_pass, hold

    def __call__(self, graph: fx.Graph) -> None:
        lower_loops(graph)
        if self.hold:
            delay_scatters(graph)
        if self.hold or recomputation_waits(graph):
            delay_recomputation(graph)
        materialize_masks(graph)
        keep_safe_donations(graph)
        if self.users_pass is not None:
            self.users_pass(graph)

    def uuid(self) -> Any:
        theirs = self.users_pass.uuid() if isinstance(self.users_pass, CustomGraphPass) else None
        if self.users_pass is not None and theirs is None:
            return None  # the user's pass has no key: not cacheable, as without mstpass
        return f"mstpass-{_sources_hash()}-{self.hold}-{theirs}"


__all__ = ["MstpassError", "OptionError", "mst"]
