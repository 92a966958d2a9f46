"""The stages in order: read, detect, plan, apply, split. The first three change nothing.

Detection says which regions there are and how each could run; the partition problem takes all of
that as plain data, and a solver decides at once which loops there are and what crosses from forward
to backward, by the simulated peak. What it decides is applied as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import networkx as nx
from torch import fx

from mstpass.graph.builder import sizes_from_inputs
from mstpass.graph.joint import JointGraph, Modules
from mstpass.graph.source import source_of
from mstpass.graph.tokens import CannotTake
from mstpass.loops.apply import Applied, CycleError, apply_plans
from mstpass.loops.candidates import Choices, choices
from mstpass.loops.modes import WHOLE, region_modes
from mstpass.memory.kernels import simulate_step
from mstpass.memory.simulate import simulated, step_memory, step_us
from mstpass.memory.timeline import StepMemory
from mstpass.normalize.expand_to_tokens import spread_operands
from mstpass.normalize.hoist_token_slices import hoist_slices
from mstpass.normalize.means_as_sums import sum_means
from mstpass.options import Options
from mstpass.partition.budget import (
    BudgetError,
    budget_bytes,
    infeasible,
    simulated_limit_bytes,
    solve_within,
)
from mstpass.partition.reconstruct import reconstruct
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.partition.split import (
    TORCH_BUDGET,
    cut_problem,
    has_region_budget,
    needs_torch,
    split,
    split_by_torch,
)
from mstpass.plans import ChunkPlan, Outcome, Reconstructed, Rejection, SavePlan
from mstpass.problem.modes import Cycle, broken_policies, with_modes
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.verify import InvalidPlan, read, verify
from mstpass.regions.advice import with_fix
from mstpass.schedule.second_rematerialization import recompute_again

STAGES = ("read", "detect", "plan", "apply", "split")


@dataclasses.dataclass(frozen=True)
class Result:
    """What the pipeline made, up to the stage at which it stopped.

    Attributes:
        read: the joint graph that regions and problem speak of, before any loop.
        applied: the same with its loops.
        before: the memory of the step without loops; None where ``outcome`` has no peak of it.
        after: of the final forward and backward.
        seconds: of each stage that ran.
    """

    outcome: Outcome
    problem: CutProblem | None = None
    applied: Applied | None = None
    modules: Modules | None = None
    read: JointGraph | None = None
    before: StepMemory | None = None
    after: StepMemory | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def joint(self) -> fx.GraphModule | None:
        """The joint graph with its loops."""
        return self.applied.module if self.applied is not None else None


def run(
    module: fx.GraphModule,
    options: Options,
    *,
    num_fwd_outputs: int,
    stop_after: str = "split",
    limit_bytes: int | None = None,
    **torch_kwargs: Any,
) -> Result:
    """Plan and rewrite one joint graph. ``module`` itself is left as it is.

    Args:
        module: the joint graph, after Inductor's joint passes.
        stop_after: a stage's name.
        limit_bytes: for the simulated peak, in place of that of a budget in bytes.
        torch_kwargs: what AOTAutograd passes to a partitioner.

    Raises:
        BudgetError: under ``strict``, where no plan stays within ``memory_budget``.
        InvalidPlan: under ``strict``, where a solver's plan does not give backward what it needs.
    """
    if stop_after not in STAGES:
        raise ValueError(f"stop_after must be one of {STAGES}, got {stop_after!r}")
    limit = simulated_limit_bytes(options) if limit_bytes is None else limit_bytes

    def planned(limit: int | None) -> tuple[Result, StepMemory | None]:
        with collector_paused():
            return _run(module, options, num_fwd_outputs, stop_after, limit, torch_kwargs)

    result, memory = planned(limit)
    budget = budget_bytes(options)
    if budget is None or limit is None or memory is None or memory.peak_bytes <= budget:
        return result
    if limit:  # the plan of ``memory_budget=0.0`` has choices that no other limit has
        least, least_memory = planned(0)
        if least_memory is not None and least_memory.peak_bytes < memory.peak_bytes:
            result, memory = least, least_memory
    if memory.peak_bytes <= budget:
        return result
    note = infeasible(budget, memory)
    if options.strict:
        raise BudgetError(note)
    warnings.warn(f"mstpass: {note}", stacklevel=2)
    outcome = dataclasses.replace(result.outcome, notes=(*result.outcome.notes, note))
    return dataclasses.replace(result, outcome=outcome)


def _run(
    module: fx.GraphModule,
    options: Options,
    num_fwd_outputs: int,
    stop_after: str,
    limit: int | None,
    torch_kwargs: dict[str, Any],
) -> tuple[Result, StepMemory | None]:
    """One plan, for a simulated peak within the limit or the lowest, and what it needs.

    A limit of 0 is for ``memory_budget=0.0``: the same plan, from the same choices.
    """
    if limit == 0:
        options = dataclasses.replace(options, memory_budget=0.0)
    watch = _Watch()
    joint = JointGraph(module, num_fwd_outputs)
    watch.stop("read")
    regions: list[Choices] = []
    rejections: list[Rejection] = []
    if has_region_budget(joint.nodes):  # torch wants it on every node, so on loops as well
        rejections = [Rejection("detect", "graph", TORCH_BUDGET)]
    elif options.chunk == "auto":
        joint, regions, rejections = _detect(joint, options)
    watch.stop("detect")
    if stop_after in STAGES[:2]:
        return Result(Outcome((), _with_fixes(rejections))), None
    problem, regions, more = _problem(joint, regions, options)
    rejections += more
    plan = _solve(problem, options, limit, needs_torch(joint))
    plans, more = _chosen(regions, plan)
    rejections += more
    watch.stop("plan")
    if stop_after == "plan":
        return Result(Outcome(tuple(plans), _with_fixes(rejections)), problem), None
    applied, plans, more = _apply(joint, plans, options)
    rejections += more
    watch.stop("apply")
    if stop_after == "apply":
        return Result(Outcome(tuple(plans), _with_fixes(rejections)), problem, applied), None
    rewritten = JointGraph(applied.module, num_fwd_outputs)
    modules, save_plan, note = _split(rewritten, applied, plan, options, torch_kwargs)
    save_plan = _named(save_plan, applied, joint)
    rows_first = options.frees_memory_for_time
    memory = simulate_step(modules[0].graph, modules[1].graph, rows_first)
    notes = [note] if note else []
    least = options.memory_budget == 0.0 or (limit is not None and memory.peak_bytes > limit)
    if least and save_plan.solver != "torch":
        modules, memory = recompute_again(modules, memory, rows_first)
    peak_bytes = memory.peak_bytes if memory.known else None
    refused = _with_fixes(rejections)
    outcome = Outcome(
        tuple(plans), refused, save_plan, peak_bytes, notes=tuple(notes), limit_bytes=limit
    )
    before: StepMemory | None = None
    if memory.known and save_plan.solver != "torch":
        whole = dataclasses.replace(problem, regions=())
        saved = min_cut(whole)
        before = step_memory(whole, saved)
        before_us = step_us(whole, saved)
        after_us = simulated(problem, plan).us
        outcome = dataclasses.replace(
            outcome,
            baseline_peak_bytes=before.peak_bytes,
            extra_time=after_us / before_us - 1 if before_us else 0.0,  # nothing but views
        )
    watch.stop("split")
    after = memory if memory.known else None
    result = Result(outcome, problem, applied, modules, joint, before, after, watch.seconds)
    return result, memory


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in here, where it was on; what is not in cycles is freed as ever.

    Planning makes many small objects and hardly a cycle. Each full collection walks over all that
    torch and the model have, to free nothing: a fifth of the time that planning takes.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Watch:
    """Seconds of each stage, from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._start
        self._start = now


def _with_fixes(rejections: list[Rejection]) -> tuple[Rejection, ...]:
    return tuple(map(with_fix, rejections))


# ---- detect ------------------------------------------------------------------------------------
def _detect(
    joint: JointGraph, options: Options
) -> tuple[JointGraph, list[Choices], list[Rejection]]:
    """The regions, and the joint graph that they speak of: made ready for them where that helps."""
    joint = sizes_from_inputs(joint)
    prepared, sums = sum_means(joint)
    hoisted = hoist_slices(prepared)
    prepared = hoisted.joint if hoisted is not None else prepared
    prepared, spread = spread_operands(prepared)
    if prepared is joint:
        return joint, *choices(joint, options)
    changed = sums | spread | (hoisted.moved if hoisted is not None else frozenset())
    regions, rejections = choices(prepared, options)
    if any(name in changed for region in regions for name, _ in region.plans[0][1].members):
        return prepared, regions, rejections
    # That was not what stood in the way: the graph stays, the true reasons are told.
    return joint, choices(joint, options)[0], rejections


# ---- plan --------------------------------------------------------------------------------------
def _problem(
    joint: JointGraph, regions: list[Choices], options: Options
) -> tuple[CutProblem, list[Choices], list[Rejection]]:
    """The partition problem; regions whose loops cannot be written are left out."""
    rejections: list[Rejection] = []
    while True:
        try:
            modes = region_modes(joint, regions, options.accumulate)
            problem = cut_problem(joint, modes, options.frees_memory_for_time)
            with_modes(problem, {})
            broken = broken_policies(problem)
            if not broken:
                return problem, regions, rejections
            guilty = next(choice for choice in regions if choice.region in broken)
            node = broken[guilty.region]
            reason = f"a loop would save {node}, whose checkpoint policy is must_recompute"
        except Cycle as error:
            loop = error.loop
            guilty = next(
                choice
                for choice, region in zip(regions, modes, strict=True)
                if any(loop == one.name for mode in region.modes for one in mode.loops)
            )
            reason = f"the loops of {guilty.region} need their own results"
        except CannotTake as error:
            guilty = next(c for c in regions if any(error.node.name == m for m in _members(c)))
            reason = f"{error.node.name}: {error.reason}"
        rejections.append(_rejected("apply", guilty.plans[0][1], reason))
        regions = [choice for choice in regions if choice is not guilty]


def _members(choice: Choices) -> list[str]:
    return [name for name, _ in choice.plans[0][1].members]


def _rejected(stage: str, plan: ChunkPlan, reason: str) -> Rejection:
    return Rejection(stage, plan.members[0][0], reason, plan.source, plan.bytes_before)


def _solve(
    problem: CutProblem, options: Options, limit_bytes: int | None, left_to_torch: str = ""
) -> Plan:
    """The solver's plan, verified; the minimum cut's where it is not valid.

    Args:
        left_to_torch: why torch's partitioner will choose what crosses; of such a graph only the
            modes count, and no saved set need exist.
    """
    name = AUTO if options.solver == "auto" else options.solver
    try:
        plan = solve_within(problem, options, SOLVERS[name], limit_bytes)
        verify(with_modes(problem, plan.modes).allowing(True), plan.saved, plan.nested)
        return plan
    except (InvalidPlan, Cycle, KeyError, nx.NetworkXUnbounded) as error:
        if left_to_torch:
            return Plan(frozenset(), {})
        if options.strict:
            raise InvalidPlan(f"solver {name!r}: {error}") from error
        warnings.warn(f"mstpass: solver {name!r}: {error}; min_cut is used", stacklevel=2)
        return SOLVERS["min_cut"](problem, None)


def _chosen(regions: list[Choices], plan: Plan) -> tuple[list[ChunkPlan], list[Rejection]]:
    plans: list[ChunkPlan] = []
    rejections: list[Rejection] = []
    for choice in regions:
        first = WHOLE if choice.whole_first else choice.plans[0][0]
        name = plan.modes.get(choice.region, first)
        if name == WHOLE:
            reason = "the step's peak lies elsewhere: chunks would not lower it"
            if choice.whole_first:
                reason = "to save in chunks gains nothing, and the plan needs no recomputation here"
            rejections.append(_rejected("plan", choice.plans[0][1], reason))
        else:
            plans.append(choice[name])
    return plans, rejections


# ---- apply -------------------------------------------------------------------------------------
def _apply(
    joint: JointGraph, plans: list[ChunkPlan], options: Options
) -> tuple[Applied, list[ChunkPlan], list[Rejection]]:
    """The rewritten graph; plans whose loops cannot be written are left out, with the reason."""
    rejections: list[Rejection] = []
    while True:
        try:
            return apply_plans(joint, plans, options.accumulate), plans, rejections
        except CycleError as error:
            guilty, reason = error.plan, str(error)
        except CannotTake as error:
            guilty = next(p for p in plans if any(error.node.name == m for m, _ in p.members))
            reason = f"{error.node.name}: {error.reason}"
        rejections.append(_rejected("apply", guilty, reason))
        plans = [plan for plan in plans if plan is not guilty]


# ---- split -------------------------------------------------------------------------------------
def _split(
    joint: JointGraph, applied: Applied, plan: Plan, options: Options, torch_kwargs: dict[str, Any]
) -> tuple[Modules, SavePlan, str]:
    """Forward and backward modules, what crosses, and a note where that is not the plan's."""
    reason = needs_torch(joint)
    if reason:
        return (
            *split_by_torch(joint, **torch_kwargs),
            f"torch's partitioner split it: {reason}",
        )
    name = AUTO if options.solver == "auto" else options.solver
    saved = frozenset(applied.names.get(value, "") for value in plan.saved)
    problem = cut_problem(joint, rows_first=options.frees_memory_for_time)
    note = ""
    try:
        verify(problem.allowing(True), saved)
        saved = read(problem, saved)
    except InvalidPlan as error:  # a region was left out after the plan was made
        saved, note = min_cut(problem), f"the saved values are min_cut's: {error}"
        name = "min_cut"
    again = frozenset() if note else plan.nested  # of regions that were left out, none
    nested = frozenset(applied.names[value] for value in again if value in applied.names)
    joint, saved, done = _reconstruct(joint, problem, saved, nested, options)
    modules, crossing = split(joint, saved, name, nested, **torch_kwargs)
    return modules, dataclasses.replace(crossing, reconstructed=done), note


def _named(save_plan: SavePlan, applied: Applied, joint: JointGraph) -> SavePlan:
    """What crosses, with the nodes of the graph before loops that it is."""
    names = applied.old_names()
    saved = []
    for value in save_plan.saved:
        node = joint.by_name.get(names.get(value.node, ""))
        if node is not None:
            source = value.source or source_of(node)
            value = dataclasses.replace(value, value=node.name, source=source)
        saved.append(value)
    return dataclasses.replace(save_plan, saved=tuple(saved))


def _reconstruct(
    joint: JointGraph,
    problem: CutProblem,
    saved: frozenset[str],
    nested: frozenset[str],
    options: Options,
) -> tuple[JointGraph, frozenset[str], tuple[Reconstructed, ...]]:
    """What backward has by other means; everything as it was where that would raise the peak."""
    pack_masks = options.frees_memory_for_time
    free = problem.allowing(True)
    reduced, kept, done = reconstruct(joint, free, saved, options.reconstruct, pack_masks)
    if not done:
        return joint, saved, ()
    other = cut_problem(reduced, rows_first=options.frees_memory_for_time)
    verify(other.allowing(True), kept)
    before = step_memory(problem, saved, nested)
    if step_memory(other, kept, nested).peak_bytes > before.peak_bytes:
        return joint, saved, ()
    return reduced, kept, done
