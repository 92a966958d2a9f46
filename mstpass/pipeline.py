"""The stages that turn one joint graph into a forward and a backward graph.

    read    the joint graph: forward, backward, tangents       graph/joint.py
    detect  regions that can run in chunks, and rejections      normalize/, regions/, loops/
    plan    the partition problem, and a solver's plan for it    problem/, partition/solvers/
    apply   the chosen regions as loops, in a new joint graph    loops/apply_plans.py
    split   forward, backward, and what crosses between them     partition/, schedule/

The first three stages change nothing. ``run`` can stop after any stage. One solver decides which
loops there are and which values cross, together, by the simulated peak of the step. If its loops
raise that above the peak of the step without any, there are fewer (fewer_loops.py), and in the end
what Inductor alone would save. What is written is the problem in which the plan's modes are chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from mstpass import pipeline_stages
from mstpass.detect_stage import Detected, detect
from mstpass.fewer_loops import with_loops_in_bounds
from mstpass.graph.joint import JointGraph, Modules
from mstpass.graph.narrow_offsets import narrow_calls
from mstpass.graph.renew_values import share_storages
from mstpass.limit import Limit, simulated_limit
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_ops import StepMemory
from mstpass.normalize import MASKS, READ
from mstpass.normalize.masks_as_flags import WithoutMasks
from mstpass.options import Options
from mstpass.partition.solve import BudgetError, infeasible, missed_budgets
from mstpass.partition.solvers.least_host_memory import more_host_memory
from mstpass.partition.split import inductor_alone
from mstpass.passes.runner import PassRunner, failures
from mstpass.plans import ChunkPlan, Outcome, Rejection
from mstpass.problem.problem import CutProblem
from mstpass.regions.attention import whole_masks
from mstpass.torch_internals.batch_sizes import note_sizes_by_data

STAGES = ("read", "detect", "plan", "apply", "split")
_MOST_EXTRA_TIME = 1.0  # a fraction; a report says where a plan takes more
_SLOW = "this plan takes {:.1f} times as long as Inductor alone: no faster one has as low a peak"


@dataclasses.dataclass(frozen=True)
class Result:
    """What the pipeline made, up to the stage after which it stopped.

    Attributes:
        problem: the partition problem that was solved.
        joint: the joint graph with its loops.
        modules: the forward and the backward graph.
        read: the joint graph before any loop; regions and ``problem`` name its nodes.
        before: the simulated memory of the step under Inductor alone; None where a size depends on
            data and where torch's partitioner split the graph.
        memory: the simulated memory of ``modules``.
        seconds: the time that each stage took.
        pass_seconds: the time that each pass took, by name, as part of its stage.
    """

    outcome: Outcome
    problem: CutProblem | None = None
    joint: fx.GraphModule | None = None
    modules: Modules | None = None
    read: JointGraph | None = None
    before: StepMemory | None = None
    memory: StepMemory | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pass_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def after(self) -> StepMemory | None:
        """The simulated memory of ``modules``; None where a size depends on data."""
        return self.memory if self.memory is not None and self.memory.known else None


def run(
    module: fx.GraphModule,
    options: Options,
    *,
    num_fwd_outputs: int,
    stop_after: str = "split",
    limit: Limit | None = None,
    loops_in_backward: bool = True,
    must_fit: bool = False,
    before_schedule: bool = False,
    **torch_kwargs: Any,
) -> Result:
    """Plan and rewrite one joint graph. ``module`` itself is not changed.

    Args:
        module: the joint graph, after Inductor's joint passes.
        stop_after: the name of a stage.
        limit: what the plan may take; None: what the options say.
        loops_in_backward: whether the backward may have loops. If not, only fused regions have any.
        must_fit: a plan above the budget is an error.
        before_schedule: the caller asks Inductor's schedule, and then says that a budget is missed.
        torch_kwargs: further arguments that AOTAutograd passes to a partitioner.

    Raises:
        BudgetError: under ``strict`` or ``must_fit``, when no plan stays within ``memory_budget``.
        InvalidPlan: under ``strict``, when a solver's plan lacks a value that backward needs.
    """
    if stop_after not in STAGES:
        raise ValueError(f"stop_after must be one of {STAGES}, got {stop_after!r}")

    def planned(limit: Limit) -> Result:
        with collector_paused():
            joint = functools.partial(JointGraph, module, num_fwd_outputs)
            return _run_stages(joint, options, loops_in_backward, stop_after, limit, torch_kwargs)

    result = _within(limit or Limit.of(options), planned, options)
    missed = next(iter(missed_budgets(result.outcome.notes)), "")
    if missed and (must_fit or (options.strict and not before_schedule)):
        raise BudgetError(missed)
    if missed and not before_schedule:
        warnings.warn(f"mstpass: {missed}", stacklevel=2)
    narrow = narrow_calls(module.graph for module in result.modules or ())
    for call in narrow:
        warnings.warn(f"mstpass: {call}", stacklevel=2)
    if failed := failures(result.outcome.rejections):
        warnings.warn(failed, stacklevel=2)
    return _with_notes(result, *map(str, narrow))


def _within(limit: Limit, planned: Callable[[Limit], Result], options: Options) -> Result:
    """The result within a limit, or that of the lowest peak; arguments as of ``run``.

    Args:
        planned: the result for a limit, which it may exceed.
    """
    result = planned(limit)
    if limit.is_free or result.memory is None:
        return result
    if limit.allows(result.outcome):
        before = result.before.peak_bytes if result.before is not None else math.inf
        takes_time = (result.outcome.extra_time or 0.0) > options.free_overhead
        in_vain = takes_time and options.may_choose and before <= (limit.peak_bytes or 0)
        return planned(Limit()) if in_vain else result  # the free plan is within the limit
    peaks = {result.memory.peak_bytes: result}
    for other in filter(None, (limit.after(result.outcome), Limit())):
        found = planned(other)
        if found.memory is not None:
            peaks.setdefault(found.memory.peak_bytes, found)
        result = peaks[min(peaks)]
        if limit.allows(result.outcome):
            return result
    assert result.memory is not None and limit.budget_bytes is not None, "plans have known peaks"
    note = infeasible(limit.budget_bytes, result.memory, result.outcome)
    if result.problem is not None:
        note += more_host_memory(
            result.problem, limit.peak_bytes or simulated_limit(limit.budget_bytes)
        )
    return _with_notes(result, note)


def _with_notes(result: Result, *notes: str) -> Result:
    outcome = dataclasses.replace(result.outcome, notes=(*result.outcome.notes, *notes))
    return dataclasses.replace(result, outcome=outcome)


def _run_stages(
    read: Callable[[], JointGraph],
    options: Options,
    loops_in_backward: bool,
    stop_after: str,
    limit: Limit,
    torch_kwargs: dict[str, Any],
) -> Result:
    """One plan within the limit, or one with a peak as low as there is."""
    watch, runner = _Stopwatch(), PassRunner.of(options)
    traced, _ = runner.run_all(READ, read())
    note_sizes_by_data(traced.nodes)
    joint, masks = runner.run(MASKS, traced)
    masks = masks or WithoutMasks(joint)
    watch.lap("read")
    detected = detect(joint, options, limit, runner, loops_in_backward).with_masks(masks)
    watch.lap("detect")
    if stop_after in ("read", "detect"):
        return Result(_outcome((), (*detected.rejections, *runner.refused)))
    static_inputs = torch_kwargs.get("static_lifetime_input_indices")
    alone = functools.partial(inductor_alone, traced, static_inputs)
    plan = functools.partial(pipeline_stages.plan, options, limit, traced, alone, runner)
    planned = plan(detected.joint, detected.candidates)
    whole = planned.convolutions_left_whole(joint)
    if whole:  # products in one piece would only take longer
        again = detect(joint, options, limit, runner, loops_in_backward, whole)
        refused = dict.fromkeys((*again.rejections, *detected.rejections, *planned.rejections))
        detected = dataclasses.replace(again, rejections=tuple(refused)).with_masks(masks)
        planned = plan(detected.joint, detected.candidates)
    watch.lap("plan")
    if stop_after == "plan":
        rejections = (*detected.rejections, *planned.rejections, *runner.refused)
        return Result(_outcome(planned.chunk_plans, rejections), planned.problem)
    planned = with_loops_in_bounds(planned, traced, options)
    while not isinstance(applied := pipeline_stages.apply(planned, runner), JointGraph):
        other = plan(detected.joint, applied.candidates)
        other = dataclasses.replace(other, refused=(*applied.refused, *other.refused))
        planned = with_loops_in_bounds(other, traced, options)
    watch.lap("apply")
    return _written(detected, planned, applied, options, stop_after, torch_kwargs, runner, watch)


def _written(
    detected: Detected,
    planned: pipeline_stages.Planned,
    joint: JointGraph,
    options: Options,
    stop_after: str,
    torch_kwargs: dict[str, Any],
    runner: PassRunner,
    watch: _Stopwatch,
) -> Result:
    """The graphs of a plan, from the joint graph that has its loops."""
    chunk_plans, before = planned.chunk_plans, planned.joint
    masks = whole_masks(before, joint.by_name)
    rejections = (*detected.rejections, *planned.rejections, *masks)
    if stop_after == "apply":
        outcome = _outcome(chunk_plans, (*rejections, *runner.refused))
        return Result(outcome, planned.problem, joint.module)
    crossing = pipeline_stages.split(joint, planned, options, runner, torch_kwargs)
    modules = crossing.modules
    for module in modules:
        share_storages(module.graph)
    forward, backward = (module.graph for module in modules)
    memory = simulate_step(forward, backward, not planned.limit.is_free)
    outcome = dataclasses.replace(
        _outcome(chunk_plans, (*rejections, *runner.refused)),
        save_plan=crossing.save_plan,
        peak_bytes=memory.peak_bytes if memory.known else None,
        notes=(*detected.notes, *planned.notes),
        limit_bytes=planned.limit.simulated_bytes,
        left_to_torch=crossing.left_to_torch,
    )
    alone: StepMemory | None = None
    if memory.known and not crossing.left_to_torch:
        alone, extra_time = planned.before.simulation.memory, planned.extra_time
        is_slow = options.may_choose and extra_time > _MOST_EXTRA_TIME
        slow = [_SLOW.format(1 + extra_time)] if is_slow else []
        outcome = dataclasses.replace(
            outcome,
            baseline_peak_bytes=alone.peak_bytes,
            extra_time=extra_time,
            notes=(*outcome.notes, *slow),
        )
    watch.lap("split")
    times = watch.seconds, runner.seconds
    return Result(outcome, planned.problem, joint.module, modules, before, alone, memory, *times)


def _outcome(chunk_plans: Sequence[ChunkPlan], rejections: Sequence[Rejection]) -> Outcome:
    return Outcome(tuple(chunk_plans), tuple(rejections))


class _Stopwatch:
    """The seconds of each stage, counted from the end of the one before; all runs of it count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._start
        self._start = now


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector is off in here, and then as it was before.

    Planning makes many small objects and hardly a cycle. Each full collection walks over all that
    torch and the model hold, to free nothing: a fifth of the time that planning takes.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
