"""The stages of the pipeline, one function each, and the frozen data that each hands on.

A stage does not fail because of one region: it leaves that region out, with a ``Rejection``, and
goes on with the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from mstpass.detect_stage import members_of, names_of, rejected
from mstpass.graph.joint import JointGraph, Modules
from mstpass.graph.source_location import source_of
from mstpass.graph.tokens import CannotTake
from mstpass.left_whole import reasons_left_whole
from mstpass.limit import Limit
from mstpass.loops.apply_plans import Applied, CycleError, apply_plans
from mstpass.loops.candidate_modes import RegionCandidates
from mstpass.loops.mode_costs import WHOLE, region_modes
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.memory.timeline import StepMemory
from mstpass.normalize.inputs_before_writes import as_copies
from mstpass.normalize.left_out import LeftOut, convolutions_in_vain
from mstpass.options import Options
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.host import host_memory
from mstpass.partition.inductor_alone import with_alone
from mstpass.partition.reconstruct import most_won_bytes
from mstpass.partition.reconstruct.of_plan import with_reconstruction
from mstpass.partition.solve import Solved, carried_over, solve
from mstpass.partition.solvers.candidate import Candidate, without_loops
from mstpass.partition.split import split_joint
from mstpass.partition.torch_fallback import needs_torch, split_by_torch
from mstpass.passes.facts import ALWAYS, FINISHED, NO_LOOPS, PURE_LOOPS
from mstpass.passes.runner import Pass, PassRunner
from mstpass.plans import ChunkPlan, Rejection, SavePlan
from mstpass.problem.apply_modes import Cycle, broken_policies, with_modes
from mstpass.problem.problem import CutProblem, Plan, Value


def _holder(node: fx.Node, members: Sequence[Sequence[str]]) -> int:
    """The position of the region that has the node among its members, else of one that reads it.

    Else it is the nearest of those from which the node is computed.
    """
    found = dict.fromkeys((node, *node.users))  # the nearest first
    behind = [node]
    for other in behind:  # it grows
        operands = [operand for operand in other.all_input_nodes if operand not in found]
        found.update(dict.fromkeys(operands))
        behind += operands
    position = {name: i for i, names in reversed(list(enumerate(members))) for name in names}
    for other in found:
        if other.name in position:
            return position[other.name]
    raise ValueError(f"no region has a loop that holds or reads {node.name}")


# ---- plan --------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Planned:
    """The partition problem and the plan for it, which chooses the loops.

    Attributes:
        joint: the graph that the problem describes.
        candidates: the regions of the problem.
        refused: the regions whose loops cannot be written, which the problem does not have.
        solver: the name of the solver that made the plan.
        notes: why that is not the solver of the options, if it is not.
        limit: what the plan may take.
        limit_bytes: the most bytes at the simulated peak that the solver was asked for.
        alone: what Inductor alone would do with the graph as it was traced; None if unknown.
        runner: notes what fails.
    """

    joint: JointGraph
    problem: CutProblem
    plan: Plan
    candidates: tuple[RegionCandidates, ...]
    refused: tuple[Rejection, ...]
    solver: str
    limit: Limit
    notes: tuple[str, ...] = ()
    limit_bytes: int | None = None
    alone: Candidate | None = None
    runner: PassRunner = dataclasses.field(default_factory=PassRunner)

    @property
    def chunk_plans(self) -> tuple[ChunkPlan, ...]:
        """The loops that the plan chose."""
        modes = ((c, self._mode(c)) for c in self.candidates)
        return tuple(candidate[mode] for candidate, mode in modes if mode != WHOLE)

    @functools.cached_property
    def rejections(self) -> tuple[Rejection, ...]:
        """Why other regions have no loops."""
        whole = [c for c in self.candidates if self._mode(c) == WHOLE]
        reasons: list[str] = []
        with self.runner.left_out("why regions stay whole"):
            reasons = reasons_left_whole(self.problem, self.plan, whole, self.limit)
        told = zip(whole, reasons, strict=False)  # none if that failed
        return (*self.refused, *(rejected("plan", c.plans[0][1], why) for c, why in told))

    def convolutions_left_whole(self, traced: JointGraph) -> LeftOut:
        """The convolutions that became products of which none is in a loop."""
        looped = names_of(c for c in self.candidates if self._mode(c) != WHOLE)
        whole = names_of(self.candidates) - looped
        kept, unused = (convolutions_in_vain(traced, self.joint, n) for n in (looped, whole))
        return LeftOut(convolutions=kept - unused)

    def _mode(self, candidate: RegionCandidates) -> str:
        first = WHOLE if candidate.whole_first else candidate.plans[0][0]
        return self.plan.modes.get(candidate.region, first)


def plan(
    options: Options,
    limit: Limit,
    traced: JointGraph,
    inductor_alone: Callable[[], Candidate | str],
    runner: PassRunner,
    joint: JointGraph,
    candidates: tuple[RegionCandidates, ...],
) -> Planned:
    """Choose each region's mode and the saved values, by the simulated peak.

    Args:
        traced: the graph before it was rewritten.
        inductor_alone: the step that it is under Inductor alone, or why that is not known.
    """
    left_to_torch = needs_torch(joint)
    alone = None if left_to_torch else inductor_alone()
    notes: tuple[str, ...] = ()
    if isinstance(alone, str):
        notes, alone = (f"{alone}: plans are compared with the step without loops",), None
    problem, left, refused = _problem(joint, list(candidates), options, limit)
    problem = dataclasses.replace(problem, free_overhead=options.free_overhead)
    if alone is not None:
        problem = with_alone(problem, joint, traced, alone)
    solved = solve(problem, options, limit, left_to_torch)
    return Planned(
        joint,
        problem,
        solved.plan,
        tuple(left),
        tuple(refused),
        solved.solver,
        limit,
        (*notes, *solved.notes),
        solved.limit_bytes,
        alone,
        runner,
    )


def _problem(
    joint: JointGraph, candidates: list[RegionCandidates], options: Options, limit: Limit
) -> tuple[CutProblem, list[RegionCandidates], list[Rejection]]:
    """The partition problem, without the regions whose loops cannot be written."""
    rejections: list[Rejection] = []
    host = host_memory(joint, options)
    while True:
        try:
            modes = region_modes(joint, candidates)
            repeats = options.repeats_collectives
            problem = cut_problem(joint, modes, not limit.is_free, host, repeats)
            with_modes(problem, {})
            broken = broken_policies(problem)
            if not broken:
                return problem, candidates, rejections
            guilty = next(c for c in candidates if c.region in broken)
            node = broken[guilty.region]
            reason = f"a loop would save {node}, whose checkpoint policy is must_recompute"
        except Cycle as error:
            loop = error.loop
            guilty = next(
                candidate
                for candidate, region in zip(candidates, modes, strict=True)
                if any(loop == one.name for mode in region.modes for one in mode.loops)
            )
            reason = f"the loops of {guilty.region} would read values made from their own results"
        except CannotTake as error:
            guilty = candidates[_holder(error.node, list(map(members_of, candidates)))]
            reason = f"{error.node.name}: {error.reason}"
        rejections.append(rejected("apply", guilty.plans[0][1], reason))
        candidates = [candidate for candidate in candidates if candidate is not guilty]


# ---- apply -------------------------------------------------------------------------------------
def _apply_plans(joint: JointGraph, plans: Sequence[ChunkPlan]) -> tuple[JointGraph, Applied]:
    applied = apply_plans(joint, plans)
    return JointGraph(applied.module, joint.num_fwd_outputs), applied


APPLY_PLANS = Pass(
    "apply_plans", _apply_plans, (NO_LOOPS,), (*ALWAYS, PURE_LOOPS), (CycleError, CannotTake)
)


def apply(
    joint: JointGraph, chunk_plans: tuple[ChunkPlan, ...], runner: PassRunner
) -> tuple[Applied, tuple[ChunkPlan, ...], tuple[Rejection, ...]]:
    """The joint graph with its loops, the plans that it has, and the loops that were left out."""
    left = list(chunk_plans)
    rejections: list[Rejection] = []
    while True:
        try:
            _, applied = runner.run(APPLY_PLANS, joint, left)
            if applied is None:  # refused: without the loops that cannot be written even alone
                alone = [[p] for p in left] if len(left) > 1 else []
                fewer = [p for (p,) in alone if runner.run(APPLY_PLANS, joint, [p])[1] is not None]
                left = fewer if len(fewer) < len(left) else []
                if left:
                    continue
                applied = apply_plans(joint, [])
            return applied, tuple(left), tuple(rejections)
        except CycleError as error:
            guilty, reason = error.plan, str(error)
        except CannotTake as error:
            members = [[name for name, _ in plan.members] for plan in left]
            guilty = left[_holder(error.node, members)]
            reason = f"{error.node.name}: {error.reason}"
        rejections.append(rejected("apply", guilty, reason))
        left = [chunk_plan for chunk_plan in left if chunk_plan is not guilty]


# ---- split -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Split:
    """The forward and the backward graph, and what crosses between them.

    Attributes:
        notes: why the saved values are not those of the solver of the options, if they are not.
        left_to_torch: why torch's own partitioner split the graph; empty if it did not.
    """

    modules: Modules
    save_plan: SavePlan
    notes: tuple[str, ...] = ()
    left_to_torch: str = ""


def split(
    rewritten: JointGraph,
    applied: Applied,
    planned: Planned,
    joint: JointGraph,
    options: Options,
    runner: PassRunner,
    torch_kwargs: dict[str, Any],
) -> Split:
    """Split the graph that has the loops by the plan for ``joint``, the graph before them."""
    solved, names = planned.plan, applied.old_names()
    reason = needs_torch(rewritten)
    if reason:
        modules, save_plan = split_by_torch(rewritten, **torch_kwargs)
        as_copies(modules)
        return Split(modules, _named(save_plan, names, joint), planned.notes, reason)
    problem = _problem_of(rewritten, planned, names, options)
    before = Solved(solved, planned.solver, planned.notes, planned.limit_bytes)
    chosen, name, notes, _ = carried_over(before, applied.names, problem, options, planned.limit)
    done = with_reconstruction(rewritten, problem, chosen, options, planned.limit, runner)
    if done is not None:
        rewritten, chosen = done.joint, done.plan
        problem = _problem_of(rewritten, planned, names, options)
    step = StepSimulation.of(problem, chosen)
    limit_bytes = planned.limit_bytes
    above_limit = limit_bytes is not None and step.peak_bytes > limit_bytes
    program = step.lowered_program if above_limit else step.program
    modules, save_plan = split_joint(rewritten, program, chosen, name, **torch_kwargs)
    for half, module in zip(("forward", "backward"), modules, strict=True):
        runner.check(f"split ({half})", (*FINISHED, PURE_LOOPS), rewritten, JointGraph(module, 0))
    if done is not None:
        save_plan = dataclasses.replace(save_plan, reconstructed=done.values)
    as_copies(modules)
    return Split(modules, _named(save_plan, names, joint), notes)


def _problem_of(
    rewritten: JointGraph, planned: Planned, names: Mapping[str, str], options: Options
) -> CutProblem:
    """The problem of the graph with its loops, with the times that the plan was made with.

    Args:
        names: the name in the graph before loops of each node.
    """
    host, repeats = planned.problem.host, options.repeats_collectives
    problem = cut_problem(rewritten, (), not planned.limit.is_free, host, repeats)
    closed = with_modes(planned.problem, planned.plan.modes)
    us = {value.name: value.us for value in (*closed.values, *closed.backward)}

    def timed(values: tuple[Value, ...]) -> tuple[Value, ...]:
        times = ((value, us.get(names.get(value.name, ""), value.us)) for value in values)
        return tuple(dataclasses.replace(value, us=time) for value, time in times)

    return dataclasses.replace(
        problem, values=timed(problem.values), backward=timed(problem.backward)
    )


def _named(save_plan: SavePlan, names: Mapping[str, str], joint: JointGraph) -> SavePlan:
    """The same plan, each saved value with the node that it is in the graph before loops."""
    saved = []
    value_of: dict[str, str] = {}
    for value in save_plan.saved:
        written = value.value or value.node
        node = joint.by_name.get(names.get(written, ""))
        source = value.source or (source_of(node) if node is not None else "")
        named = node.name if node is not None else ""
        value_of[written] = named or written
        saved.append(dataclasses.replace(value, value=named, source=source))
    transfers = [dataclasses.replace(t, node=value_of[t.node]) for t in save_plan.transfers]
    return dataclasses.replace(save_plan, saved=tuple(saved), transfers=tuple(transfers))


def is_lower_without_loops(
    joint: JointGraph,
    problem: CutProblem,
    options: Options,
    limit: Limit,
    peak_bytes: float,
    runner: PassRunner,
) -> bool:
    """Whether the step without loops has a lower simulated peak, by reconstruction as well."""
    before = problem.cached(without_loops)
    saved = before.plan.saved
    if before.peak_bytes < peak_bytes:
        return True
    won_bytes = most_won_bytes(joint, before.problem, saved, options.reconstruct)
    if before.peak_bytes - won_bytes >= peak_bytes:
        return False
    done = with_reconstruction(joint, before.problem, before.plan, options, limit, runner)
    return done is not None and simulate_plan(done.problem, done.plan).peak_bytes < peak_bytes


def compared(planned: Planned) -> tuple[StepMemory, float]:
    """The memory of the step under Inductor alone, and the plan's extra time over that as a
    fraction."""
    before = (planned.alone or planned.problem.cached(without_loops)).simulation
    after_us = simulate_plan(planned.problem, planned.plan).us
    extra_time = after_us / before.us - 1 if before.us else 0.0  # a step of views takes no time
    return before.memory, extra_time
