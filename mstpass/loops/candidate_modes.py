"""The modes in which each region may run, one chunk plan for each; the preferred one comes first.

    fused      forward and backward in one loop                 heads whose loss is a scalar
    save       the forward loop keeps what backward needs       MLPs, and values that are returned
    recompute  the backward loop computes the forward again     other heads; all for least memory

After its preferred mode a region is offered recompute mode, which needs less memory, in chunks of
the usual length and in chunks as short as matrix products bear. (A region that is fused, or whose
large values the step returns, is offered its preferred mode in short chunks instead.) Where a
budget asks, mixed mode is offered (loops/sections.py); where it has the shortest chunks that are
tolerable, the sums that it spares are small, and the other mode is offered in such chunks. A mode
is left out if another one is as lean and faster (loops/mode_costs.py). Without a
budget it is also offered its preferred mode in long chunks, without repeated products, for steps
whose loops take too long together. Where gradients of weights are in 16 bits and large, modes are
also offered with sums over chunks in 16 bits, in as few chunks as their error allows. Which of them
runs, or whether the region stays whole, is part of the partition problem: a solver chooses it
(loops/mode_costs.py, partition/solvers/).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mstpass.graph.advice import under_a_budget
from mstpass.graph.axes import TOKENS
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import Spec
from mstpass.limit import Limit
from mstpass.loops.chunk_length import FEW, LONG, SHORT, SHORTEST, USUAL
from mstpass.loops.copies import Names
from mstpass.loops.free_overhead import spend_free_overhead
from mstpass.loops.plan_region import CopyPlanner, RegionPlanner, planners_of
from mstpass.options import Options
from mstpass.passes.runner import PassRunner
from mstpass.plans import FUSED, MIXED, RECOMPUTE, SAVE, ChunkPlan, Region, Rejection
from mstpass.regions.detect import find_regions, region_along_features

_LENGTHS = {  # names of modes
    USUAL: "{}",
    SHORT: "{}, short chunks",
    LONG: "{}, long chunks",
    FEW: "{}, 16-bit sums",
    SHORTEST: "{}, shortest chunks",
}


def name_of(mode: str, length: str) -> str:
    """The name of a mode in chunks of a length (loops/chunk_length.py)."""
    return _LENGTHS[length].format(mode)


@dataclasses.dataclass(frozen=True)
class RegionCandidates:
    """The ways in which one region may run.

    Attributes:
        region: the name by which the partition problem knows the region.
        plans: name and chunk plan of each mode, the preferred one first.
        optional: the region may also stay whole.
        whole_first: it stays whole unless a budget asks for less memory.
        original: the region that this one is equal to but for names (loops/copies.py); "" if it is
            the first of its kind.
        names: the names of its nodes, by those of the original's.
    """

    region: str
    plans: tuple[tuple[str, ChunkPlan], ...]
    optional: bool
    whole_first: bool = False
    original: str = ""
    names: Names = dataclasses.field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> ChunkPlan:
        return dict(self.plans)[name]

    def name_in_copy(self, name: str) -> str:
        """The node that one of the original is here."""
        return self.names.get(name, name)

    @property
    def members(self) -> dict[str, Spec | None]:
        """The nodes of all these ways, each with its spec."""
        return {name: spec for _, plan in self.plans for name, spec in plan.members}

    def in_forward(self) -> RegionCandidates:
        """The same region with those ways alone that have all loops in the forward."""
        plans = tuple((name, plan) for name, plan in self.plans if plan.mode == FUSED)
        return dataclasses.replace(self, plans=plans)

    @property
    def unbounded(self) -> bool:
        """Whether later batches may be longer than the one that is planned for."""
        return self.plans[0][1].unbounded


_PLANNING = "planning of a region's loops"


def find_candidates(
    joint: JointGraph, options: Options, limit: Limit, runner: PassRunner
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of every region, and the large parts of the graph that do not run in chunks.

    The graph does not change.
    """
    regions, rejections = find_regions(joint, not limit.is_free, runner)
    length = SHORT if limit.is_least else USUAL
    by_region = planners_of(joint, regions, options)
    planners = {region.members: planner for region, planner in by_region.items()}
    preferred: list[ChunkPlan] = []
    leaner: list[RegionCandidates] = []
    for planner in planners.values():
        with runner.left_out(_PLANNING, planner.region.name):
            mode = preferred_mode(planner.region, limit)
            plan = planner.plan(mode, length=length)
            if isinstance(plan, ChunkPlan) and planner.region.axis == TOKENS:
                preferred.append(plan)
            elif isinstance(plan, ChunkPlan):
                leaner.append(_for_a_budget(planner, plan, limit))
            elif few := planner.with_16_bit_sums(mode):
                preferred.append(few)
            elif candidates := _for_few_tokens(joint, planner, regions, limit):
                leaner.append(candidates)
            else:
                rejections.append(plan)

    recomputed: dict[object, frozenset[str]] = {}  # by a region's members

    def replan(plan: ChunkPlan, may_recompute: frozenset[str]) -> ChunkPlan:
        other = planners[plan.members].plan(plan.mode, may_recompute, length=length)
        if not isinstance(other, ChunkPlan):
            return plan
        recomputed[plan.members] = may_recompute
        return other

    preferred = spend_free_overhead(joint, preferred, options.free_overhead, replan)
    taken = []
    for p in preferred:
        planner, again = planners[p.members], recomputed.get(p.members, frozenset())
        with runner.left_out(_PLANNING, planner.region.name):
            taken.append(_candidates(planner, p, limit, again))
    if limit.is_free and rejections:  # of which a budget may take some
        still = {r.node for r in find_candidates(joint, options, Limit(0.0), runner)[1]}
        rejections = [r if r.node in still else _under_a_budget(r) for r in rejections]
    return [*taken, *leaner], rejections


def _under_a_budget(rejection: Rejection) -> Rejection:
    reason = under_a_budget(rejection.reason, "it may run in chunks")
    return dataclasses.replace(rejection, reason=reason, fix=reason.advice)


def preferred_mode(region: Region, limit: Limit) -> str:
    """The mode that takes no extra time; for the least memory, the one of least memory."""
    if region.fused:
        return FUSED
    if region.returned:
        return SAVE  # the step returns those values, so they exist in any case
    return RECOMPUTE if region.kind == "lm_head" or limit.is_least else SAVE


def _only_for_a_budget(planner: RegionPlanner, limit: Limit) -> RegionCandidates | None:
    """For a region that gains nothing in its preferred mode: a leaner one, if a budget asks."""
    if limit.is_free or planner.region.returned:
        return None
    modes = [MIXED] if planner.region.fused else [RECOMPUTE, MIXED]
    plans = (planner.plan(mode, length=SHORT) for mode in modes)
    plan = next((plan for plan in plans if isinstance(plan, ChunkPlan)), None)
    if plan is None:
        return None
    return _for_a_budget(planner, plan, limit)


def _for_few_tokens(
    joint: JointGraph, planner: RegionPlanner, regions: Sequence[Region], limit: Limit
) -> RegionCandidates | None:
    """For a region that gains nothing from its preferred mode: what a budget may ask for."""
    leaner = _only_for_a_budget(planner, limit)
    return leaner or _along_features(joint, planner, regions, limit)


def _along_features(
    joint: JointGraph, planner: RegionPlanner, regions: Sequence[Region], limit: Limit
) -> RegionCandidates | None:
    """Loops over features for a region of too few tokens, if a budget asks."""
    if limit.is_free or planner.region.axis != TOKENS or planner.region.returned:
        return None
    others = [region for region in regions if region is not planner.region]
    region = region_along_features(joint, planner.region, others)
    if region is None:
        return None
    other = RegionPlanner(joint, region, planner.options)
    plan = other.plan(preferred_mode(region, limit), length=SHORT)
    return _for_a_budget(other, plan, limit) if isinstance(plan, ChunkPlan) else None


def _for_a_budget(planner: RegionPlanner, plan: ChunkPlan, limit: Limit) -> RegionCandidates:
    candidates = _candidates(planner, plan, limit)
    return dataclasses.replace(candidates, whole_first=candidates.optional)


def _candidates(
    planner: RegionPlanner,
    preferred: ChunkPlan,
    limit: Limit,
    may_recompute: frozenset[str] = frozenset(),
) -> RegionCandidates:
    """The preferred plan, and others that need less memory.

    A region keeps its loops if ``chunk_tokens`` is given, or if its token count varies: later
    batches may be longer than the one that the graph was traced with.

    Args:
        may_recompute: names of the matmuls that the preferred plan may compute again.
    """
    region = planner.region
    first = USUAL if planner.accumulates_as_asked(preferred) else FEW
    plans = {name_of(preferred.mode, first): preferred}
    optional = planner.options.chunk_tokens is None and not region.unbounded
    leaner = preferred.mode if region.fused or region.returned else RECOMPUTE
    others = [(leaner, USUAL), (leaner, SHORT)]
    if planner.has_sections and not limit.is_free:
        others += [(MIXED, USUAL), (MIXED, SHORT)]
    if optional and limit.is_free:
        others.append((preferred.mode, LONG))
    for mode, length in others:
        plan = planner.plan(mode, length=length)
        if isinstance(plan, ChunkPlan) and plan not in plans.values():
            plans.setdefault(name_of(mode, length), plan)
    mixed = plans.get(name_of(MIXED, SHORT))
    if mixed is not None and optional:  # the sums that it spares may be small
        plan = planner.plan(leaner, length=SHORTEST)
        if isinstance(plan, ChunkPlan) and plan.chunk_tokens == mixed.chunk_tokens:
            plans[name_of(leaner, SHORTEST)] = plan
    again = {preferred.mode: may_recompute, **({} if limit.is_free else {leaner: frozenset()})}
    for mode, matmuls in again.items():
        other = plans.get(name_of(mode, LONG), plans.get(mode))
        few = planner.with_16_bit_sums(mode, matmuls, other)
        if few is not None and few not in plans.values():
            plans[name_of(mode, FEW)] = few
    # The last member names the region: two heads may begin with the same view.
    found = RegionCandidates(region.members[-1][0], tuple(plans.items()), optional)
    if isinstance(planner, CopyPlanner):
        original = planner.original.region.members[-1][0]
        return dataclasses.replace(found, original=original, names=planner.names)
    return found
