"""The stages of the pipeline, one function each, and the frozen data that each hands on.

A stage does not fail because of one region: it leaves that region out, with a ``Rejection``, and
goes on with the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from mstpass.detect_stage import names_of, rejected
from mstpass.graph.advice import MAY_SAVE, REPORT, Reason, fix_of
from mstpass.graph.joint import JointGraph, Modules, tensors_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import depends_on_data
from mstpass.graph.tokens import CannotTake
from mstpass.left_whole import reasons_left_whole
from mstpass.limit import Limit
from mstpass.loops.apply_plans import apply_plans
from mstpass.loops.candidate_modes import RegionCandidates
from mstpass.loops.mode_costs import copied_nodes, region_modes
from mstpass.memory.program import Program
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.normalize.plain_values import as_copies
from mstpass.normalize.products import bases_of_convolutions, made_in_vain
from mstpass.options import Options
from mstpass.partition.build_problem import cut_problem, host_memory
from mstpass.partition.reconstruct import with_reconstruction
from mstpass.partition.solve import solve
from mstpass.partition.solvers.candidate import Candidate, without_loops
from mstpass.partition.split import needs_torch, split_by_torch, split_joint, with_alone
from mstpass.passes.runner import Pass, PassRunner
from mstpass.plans import ChunkPlan, Rejection, SavePlan
from mstpass.problem.apply_modes import Cycle, broken_policies, with_modes
from mstpass.problem.names import value_name
from mstpass.problem.problem import CutProblem, Plan


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
    def before(self) -> Candidate:
        """The step under Inductor alone; where that is not known, the step without any loop."""
        return self.alone or self.problem.cached(without_loops)

    @functools.cached_property
    def simulation(self) -> StepSimulation:
        """The step of the plan."""
        return simulate_plan(self.problem, self.plan)

    @property
    def extra_time(self) -> float:
        """The plan's extra time over Inductor alone, as a fraction."""
        before_us = self.before.us
        return self.simulation.us / before_us - 1 if before_us else 0.0  # of a step of views

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether the step can be simulated: no size depends on data, and the split is ours."""
        values = (value for n in self.joint.nodes for value in tensors_of(n.meta.get("val")))
        return not needs_torch(self.joint) and not any(map(depends_on_data, values))

    def program_of(self, step: StepSimulation) -> Program:
        """What is written of a step: cheap values run twice where the peak is above the limit."""
        return step.lowered_program if self._is_above_limit(step) else step.program

    @property
    def peak_bytes(self) -> int:
        """The simulated peak of what is written."""
        step = self.simulation
        return step.lowered_peak_bytes if self._is_above_limit(step) else step.peak_bytes

    def _is_above_limit(self, step: StepSimulation) -> bool:
        return self.limit_bytes is not None and step.peak_bytes > self.limit_bytes

    @property
    def chunk_plans(self) -> tuple[ChunkPlan, ...]:
        """The loops that the plan chose."""
        return tuple(filter(None, map(self._plan_of, self.candidates)))

    @functools.cached_property
    def rejections(self) -> tuple[Rejection, ...]:
        """Why other regions have no loops."""
        whole = [c for c in self.candidates if not self._plan_of(c)]
        reasons: list[str] = []
        with self.runner.left_out("why regions stay whole"):
            reasons = reasons_left_whole(self.problem, self.plan, whole, self.limit)
        told = zip(whole, reasons, strict=False)  # none if that failed
        return (*self.refused, *(rejected("plan", c.plans[0][1], why) for c, why in told))

    def convolutions_left_whole(self, traced: JointGraph) -> frozenset[str]:
        """The bases of weights of convolutions that became products of which none is in a loop."""
        looped = names_of(filter(self._plan_of, self.candidates))
        whole = names_of(self.candidates) - looped
        without, unused = (made_in_vain(traced, self.joint, names) for names in (looped, whole))
        return (without - unused) & bases_of_convolutions(traced)

    def _plan_of(self, candidate: RegionCandidates) -> ChunkPlan | None:
        """The loops of a region; None if it stays whole."""
        return candidate.plan_in(self.plan.modes.get(candidate.region))


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
            copies = copied_nodes(joint, candidates)
            problem = cut_problem(joint, modes, not limit.is_free, host, repeats, copies)
            with_modes(problem, {})
            broken = broken_policies(problem)
            if not broken:
                return problem, candidates, rejections
            guilty = next(c for c in candidates if c.region in broken)
            node = broken[guilty.region]
            reason = f"a loop would save {node}, whose checkpoint policy is must_recompute"
            told = MAY_SAVE(reason)
        except Cycle as error:
            loop = error.loop
            guilty = next(
                candidate
                for candidate, region in zip(candidates, modes, strict=True)
                if any(loop == one.name for mode in region.modes for one in mode.loops)
            )
            reason = f"the loops of {guilty.region} would read values made from their own results"
            told = REPORT(reason)
        except CannotTake as error:
            guilty = candidates[_holder(error.node, [[*c.members] for c in candidates])]
            told = _told(error)
        rejections.append(rejected("apply", guilty.plans[0][1], told))
        candidates = [candidate for candidate in candidates if candidate is not guilty]


# ---- apply -------------------------------------------------------------------------------------
def _apply_plans(joint: JointGraph, plans: Sequence[ChunkPlan]) -> tuple[JointGraph, bool]:
    return apply_plans(joint, plans), True


APPLY_PLANS = Pass("apply_plans", _apply_plans, answers=(CannotTake,))


def _told(refusal: CannotTake) -> Reason:
    return Reason(f"{refusal.node.name}: {refusal.reason}", fix_of(refusal.reason))


def apply(planned: Planned, runner: PassRunner) -> JointGraph | Planned:
    """The joint graph with its loops; where some cannot be written, a plan without these regions.

    The second is planned anew, by the caller: its plan is that for the regions that are left.
    """
    joint, plans = planned.joint, planned.chunk_plans
    if not plans:
        return joint
    rejections: list[Rejection] = []
    try:
        rewritten, done = runner.run(APPLY_PLANS, joint, plans)
        if done:
            return rewritten
        alone = plans if len(plans) > 1 else ()
        guilty = [p for p in alone if runner.run(APPLY_PLANS, joint, [p])[1] is None] or [*plans]
    except CannotTake as error:
        one = plans[_holder(error.node, [[name for name, _ in plan.members] for plan in plans])]
        guilty, rejections = [one], [rejected("apply", one, _told(error))]
    left = (c for c in planned.candidates if not any(p in guilty for _, p in c.plans))
    refused = (*planned.refused, *rejections)
    return dataclasses.replace(planned, candidates=tuple(left), refused=refused)


# ---- split -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Split:
    """The forward and the backward graph, and what crosses between them.

    Attributes:
        left_to_torch: why torch's own partitioner split the graph; empty if it did not.
    """

    modules: Modules
    save_plan: SavePlan
    left_to_torch: str = ""


def split(
    rewritten: JointGraph,
    planned: Planned,
    options: Options,
    runner: PassRunner,
    torch_kwargs: dict[str, Any],
) -> Split:
    """Split the graph that has the loops by the plan, which speaks of the graph before them."""
    reason = needs_torch(rewritten)
    if reason:
        modules, save_plan = split_by_torch(rewritten, **torch_kwargs)
        as_copies(modules)
        return Split(modules, _named(save_plan, planned.joint), reason)
    step, plan = planned.simulation, planned.plan
    done = with_reconstruction(rewritten, step.problem, plan, options, planned.limit, runner)
    if done is not None:
        problem, plan, written = done
        rewritten, step = written.joint, StepSimulation.of(problem, plan)
    program = planned.program_of(step)
    modules, save_plan = split_joint(rewritten, program, plan, planned.solver, **torch_kwargs)
    for half, module in zip(("forward", "backward"), modules, strict=True):
        runner.check(f"split ({half})", rewritten, JointGraph(module, 0))
    if done is not None:
        save_plan = dataclasses.replace(save_plan, reconstructed=written.done)
    as_copies(modules)
    return Split(modules, _named(save_plan, planned.joint))


def _named(save_plan: SavePlan, joint: JointGraph) -> SavePlan:
    """The same plan, each saved value with the node that it is in the graph before loops."""
    saved = []
    for value in save_plan.saved:
        node = joint.by_name.get(value_name(value.value or value.node))
        source = value.source or (source_of(node) if node is not None else "")
        named = node.name if node is not None else ""
        saved.append(dataclasses.replace(value, value=named, source=source))
    transfers = [dataclasses.replace(t, node=value_name(t.node)) for t in save_plan.transfers]
    return dataclasses.replace(save_plan, saved=tuple(saved), transfers=tuple(transfers))
