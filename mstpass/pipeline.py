"""The stages in order: read, detect, plan, apply, split. The first three change nothing.

Once it is split, the step's memory is simulated; loops that do not lower its peak are taken back
(chunk/need.py), and what is left is applied and split anew.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import fx

from mstpass.chunk.apply import CycleError, apply_plans
from mstpass.chunk.detect import detect
from mstpass.chunk.grow import CannotTake
from mstpass.chunk.hoist import hoist_slices
from mstpass.chunk.need import needless, no_higher, optional_plans, rejection
from mstpass.chunk.overhead import spend
from mstpass.chunk.plan import mode_of, plan_region
from mstpass.chunk.spread import spread_operands
from mstpass.graph.build import sizes_from_inputs
from mstpass.graph.joint import JointGraph
from mstpass.graph.memory import StepMemory, simulate_step
from mstpass.options import Options
from mstpass.partition.split import Modules, split
from mstpass.plans import ChunkPlan, Outcome, Region, Rejection, SavePlan

log = logging.getLogger(__name__)

STAGES = ("read", "detect", "plan", "apply", "split")


@dataclasses.dataclass(frozen=True)
class Result:
    """What the pipeline made, up to the stage at which it stopped."""

    outcome: Outcome
    joint: fx.GraphModule | None = None
    modules: Modules | None = None


def run(
    module: fx.GraphModule,
    options: Options,
    *,
    num_fwd_outputs: int,
    stop_after: str = "split",
    **torch_kwargs: Any,
) -> Result:
    """Plan and rewrite one joint graph. ``module`` itself is left as it is.

    Args:
        module: the joint graph, after Inductor's joint passes.
        stop_after: a stage's name.
        torch_kwargs: what AOTAutograd passes to a partitioner.
    """
    if stop_after not in STAGES:
        raise ValueError(f"stop_after must be one of {STAGES}, got {stop_after!r}")
    joint = JointGraph(module, num_fwd_outputs)
    plans: list[ChunkPlan] = []
    rejections: list[Rejection] = []
    if options.chunk == "auto":
        joint, plans, rejections = _planned(joint, options)
    if stop_after in STAGES[:3]:
        return Result(Outcome(tuple(plans), tuple(rejections)))
    if stop_after == "apply":
        rewritten, plans, more = _apply(joint, plans, options)
        return Result(Outcome(tuple(plans), (*rejections, *more)), rewritten)

    def build(plans: list[ChunkPlan]) -> _Built:
        return _build(joint, plans, options, torch_kwargs)

    built = build(plans)
    optional = optional_plans(built.plans, options)
    if optional:
        least = build([p for p in built.plans if p not in optional])
        dropped = needless(optional, built.memory, least.memory)
        kept = [p for p in built.plans if p not in dropped]
        fewer = least if kept == least.plans else build(kept) if dropped else built
        if dropped and no_higher(fewer.memory, built.memory):
            rejections += [*built.rejections, *map(rejection, dropped)]
            built = fewer
    outcome = Outcome(
        tuple(built.plans),
        (*rejections, *built.rejections),
        built.save_plan,
        built.memory.peak_bytes if built.memory.known else None,
        notes=(built.note,) if built.note else (),
    )
    return Result(outcome, built.joint, built.modules)


@dataclasses.dataclass(frozen=True)
class _Built:
    """The rewritten joint graph of some plans, split, and its memory."""

    plans: list[ChunkPlan]
    rejections: list[Rejection]
    joint: fx.GraphModule
    modules: Modules
    save_plan: SavePlan
    memory: StepMemory
    note: str


def _build(
    joint: JointGraph, plans: list[ChunkPlan], options: Options, torch_kwargs: dict[str, Any]
) -> _Built:
    rewritten, plans, rejections = _apply(joint, plans, options)
    modules, save_plan, note = split(
        JointGraph(rewritten, joint.num_fwd_outputs),
        options.solver,
        least_memory=options.memory_budget == 0.0,
        reconstruct=options.reconstruct,
        **torch_kwargs,
    )
    memory = simulate_step(*(module.graph for module in modules))
    return _Built(plans, rejections, rewritten, modules, save_plan, memory, note)


def _planned(
    joint: JointGraph, options: Options
) -> tuple[JointGraph, list[ChunkPlan], list[Rejection]]:
    """The plans, and the joint graph that they speak of: made ready for them where that helps."""
    joint = sizes_from_inputs(joint)
    hoisted = hoist_slices(joint)
    prepared = hoisted.joint if hoisted is not None else joint
    prepared, spread = spread_operands(prepared)
    if prepared is joint:
        return joint, *_plan(joint, options)
    changed = spread | (hoisted.moved if hoisted is not None else frozenset())
    plans, rejections = _plan(prepared, options)
    if any(name in changed for plan in plans for name, _ in plan.members):
        return prepared, plans, rejections
    # That was not what stood in the way: the graph stays, the true reasons are told.
    return joint, _plan(joint, options)[0], rejections


def _plan(joint: JointGraph, options: Options) -> tuple[list[ChunkPlan], list[Rejection]]:
    regions, rejections = detect(joint)
    plans: list[ChunkPlan] = []
    region_of: dict[str, Region] = {}
    for region in regions:
        planned = plan_region(joint, region, options, mode_of(region, options))
        if isinstance(planned, ChunkPlan):
            plans.append(planned)
            region_of[planned.members[0][0]] = region
        else:
            rejections.append(planned)

    def replan(plan: ChunkPlan, repeat: frozenset[str]) -> ChunkPlan:
        planned = plan_region(joint, region_of[plan.members[0][0]], options, plan.mode, repeat)
        return planned if isinstance(planned, ChunkPlan) else plan

    return spend(joint, plans, options.free_overhead, replan), rejections


def _apply(
    joint: JointGraph, plans: list[ChunkPlan], options: Options
) -> tuple[fx.GraphModule, list[ChunkPlan], list[Rejection]]:
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
        rejections.append(
            Rejection("apply", guilty.members[0][0], reason, guilty.source, guilty.bytes_before)
        )
        plans = [plan for plan in plans if plan is not guilty]
