"""The modes in which each region may run, one chunk plan for each; the preferred one comes first.

    fused      forward and backward in one loop                 heads whose loss is a scalar
    save       the forward loop keeps what backward needs       MLPs, and values that are returned
    recompute  the backward loop computes the forward again     other heads; all for least memory

After its preferred mode a region is offered recompute mode, which needs less memory, in chunks of
the usual length and in chunks as short as matrix products bear. (A region that is fused, or whose
large values the step returns, is offered its preferred mode in short chunks instead.) Where a
budget asks, mixed mode is offered (loops/sections.py); where it has the shortest chunks that are
tolerable, the sums that it spares are small, and the other mode is offered in such chunks. A mode
is left out if another one is as lean and faster (loops/mode_costs.py). Without a budget it is also
offered its preferred mode in long chunks, without repeated products, for steps whose loops take too
long together. Where gradients of weights are in 16 bits and large, modes are also offered with sums
over chunks in 16 bits, in as few chunks as their error allows. Which of them runs, or whether the
region stays whole, is part of the partition problem: a solver chooses it (loops/mode_costs.py,
partition/solvers/).

Attention may run in loops over groups of heads, in two of these modes:

    save         the forward loop keeps attention's results; the backward loop computes the
                 projections again, and no attention
    recompute    the forward loop keeps nothing

Each is offered in two, four and eight groups, as far as the heads divide so. One group holds its
share of what attention needs besides the layer's input and output and their gradients, which exist
in full in any case: with more than eight groups that share hardly counts.

Where attention has a large mask that is computed, it may also run in loops over rows of queries,
which hold the mask's rows of one chunk (regions/attention.py): *save* keeps its results, and
*recompute* nothing. These are offered in long and in short chunks, in place of the others where the
mask is larger than what loops over heads hold in parts: those read the whole mask.

Where queries share keys, attention and the MLP behind it may be one region, a block, in the same
two modes, over the tokens (regions/blocks.py). Its loops are offered in place of those over heads,
beside those of the MLP alone. ``chunk="blocks"`` has them alone, and wherever they can be.

Without a budget attention stays whole: the loops compute its projections, or its mask, twice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention, shares_keys
from mstpass.graph.axes import HEADS, TOKENS
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import WHOLE, Spec
from mstpass.limit import Limit
from mstpass.loops.chunk_length import FEW, LONG, SHORT, SHORTEST, USUAL
from mstpass.loops.plan_region import Names, RegionPlanner, matmuls_to_recompute, planners_of
from mstpass.options import Options
from mstpass.passes.runner import PassRunner
from mstpass.plans import ChunkPlan, Region, Rejection
from mstpass.problem.problem import FUSED, MIXED, RECOMPUTE, SAVE, Mode
from mstpass.regions.attention import detect_attention, detect_masked_attention
from mstpass.regions.blocks import KIND as BLOCK
from mstpass.regions.blocks import detect_blocks
from mstpass.regions.detect import find_regions, region_along_features, under_a_budget

_GROUPS = (2, 4, 8)
_LEAST_ROWS, _BLOCK = (2048, 512), 32  # of queries in a chunk, long or short; of a kernel's block


@dataclasses.dataclass(frozen=True)
class RegionCandidates:
    """The ways in which one region may run.

    Attributes:
        region: the name by which the partition problem knows the region.
        plans: each mode, without its loops, and its chunk plan; the preferred one first.
        optional: the region may also stay whole.
        whole_first: it stays whole unless a budget asks for less memory.
        original: the region that this one is equal to but for names (graph/alike.py); "" if it is
            the first of its kind.
        names: the names of its nodes, by those of the original's.
    """

    region: str
    plans: tuple[tuple[Mode, ChunkPlan], ...]
    optional: bool
    whole_first: bool = False
    original: str = ""
    names: Names = dataclasses.field(default_factory=dict, repr=False)

    def plan_in(self, mode: str | None) -> ChunkPlan | None:
        """The plan of a mode, by its name; None: of the first one. None without loops."""
        if mode is None:
            return None if self.whole_first else self.plans[0][1]
        return next((plan for known, plan in self.plans if known.name == mode), None)

    @property
    def members(self) -> dict[str, Spec | None]:
        """The nodes of all these ways, each with its spec."""
        return {name: spec for _, plan in self.plans for name, spec in plan.members}

    def in_forward(self) -> RegionCandidates:
        """The same region with those ways alone that have all loops in the forward."""
        plans = tuple((mode, plan) for mode, plan in self.plans if plan.mode == FUSED)
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
    preferred: list[tuple[RegionPlanner, ChunkPlan]] = []
    leaner: list[RegionCandidates] = []
    for region, planner in planners_of(joint, regions, options).items():
        with runner.left_out(_PLANNING, region.name):
            mode = preferred_mode(region, limit)
            plan = planner.plan(mode, length=length)
            if isinstance(plan, ChunkPlan) and region.axis != TOKENS:
                leaner.append(_candidates(planner, plan, limit, for_a_budget=True))
            elif isinstance(plan, ChunkPlan):
                preferred.append((planner, plan))
            elif few := planner.with_16_bit_sums(mode):
                preferred.append((planner, few))
            elif candidates := _leaner(planner, regions, limit):
                leaner.append(candidates)
            else:
                rejections.append(plan)
    taken = []
    again = matmuls_to_recompute(joint, [plan for _, plan in preferred], options.free_overhead)
    for (planner, plan), matmuls in zip(preferred, again, strict=True):
        with runner.left_out(_PLANNING, planner.region.name):
            other = planner.plan(plan.mode, matmuls, length) if matmuls else None
            if isinstance(other, ChunkPlan):
                taken.append(_candidates(planner, other, limit, matmuls))
            else:
                taken.append(_candidates(planner, plan, limit))
    if limit.is_free and rejections:  # of which a budget may take some
        still = {r.node for r in find_candidates(joint, options, Limit(0.0), runner)[1]}
        rejections = [r if r.node in still else under_a_budget(r) for r in rejections]
    return [*taken, *leaner], rejections


def preferred_mode(region: Region, limit: Limit) -> str:
    """The mode that takes no extra time; for the least memory, the one of least memory."""
    if region.fused:
        return FUSED
    if region.returned:
        return SAVE  # the step returns those values, so they exist in any case
    return RECOMPUTE if region.kind == "lm_head" or limit.is_least else SAVE


def _leaner(
    planner: RegionPlanner, regions: Sequence[Region], limit: Limit
) -> RegionCandidates | None:
    """For a region that gains nothing from its preferred mode: what a budget may ask for.

    This is a leaner mode or, if its tokens are too few for that, loops over features.
    """
    joint, region = planner.joint, planner.region
    if limit.is_free or region.returned:
        return None
    modes = [MIXED] if region.fused else [RECOMPUTE, MIXED]
    plan = _first_plan(planner, modes)
    if plan is None and region.axis == TOKENS:
        others = [other for other in regions if other is not region]
        along = region_along_features(joint, region, others)
        if along is not None:
            planner = RegionPlanner(joint, along, planner.options)
            plan = _first_plan(planner, [preferred_mode(along, limit)])
    return None if plan is None else _candidates(planner, plan, limit, for_a_budget=True)


def _first_plan(planner: RegionPlanner, modes: Sequence[str]) -> ChunkPlan | None:
    plans = (planner.plan(mode, length=SHORT) for mode in modes)
    return next((plan for plan in plans if isinstance(plan, ChunkPlan)), None)


def _candidates(
    planner: RegionPlanner,
    preferred: ChunkPlan,
    limit: Limit,
    may_recompute: frozenset[str] = frozenset(),
    for_a_budget: bool = False,
) -> RegionCandidates:
    """The preferred plan, and others that need less memory.

    A region keeps its loops if ``chunk_tokens`` is given, or if its token count varies: later
    batches may be longer than the one that the graph was traced with.

    Args:
        may_recompute: names of the matmuls that the preferred plan may compute again.
        for_a_budget: the region stays whole unless a budget asks for less memory.
    """
    region = planner.region
    first = USUAL if planner.accumulates_as_asked(preferred) else FEW
    plans = {Mode(preferred.mode, chunks=first): preferred}
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
            plans.setdefault(Mode(mode, chunks=length), plan)
    mixed = plans.get(Mode(MIXED, chunks=SHORT))
    if mixed is not None and optional:  # the sums that it spares may be small
        plan = planner.plan(leaner, length=SHORTEST)
        if isinstance(plan, ChunkPlan) and plan.chunk_tokens == mixed.chunk_tokens:
            plans[Mode(leaner, chunks=SHORTEST)] = plan
    again = {preferred.mode: may_recompute, **({} if limit.is_free else {leaner: frozenset()})}
    for mode, matmuls in again.items():
        other = plans.get(Mode(mode, chunks=LONG), plans.get(Mode(mode)))
        few = planner.with_16_bit_sums(mode, matmuls, other)
        if few is not None and few not in plans.values():
            plans[Mode(mode, chunks=FEW)] = few
    return candidates_of(planner, plans, optional, for_a_budget and optional)


def candidates_of(
    planner: RegionPlanner, plans: Mapping[Mode, ChunkPlan], optional: bool, whole_first: bool
) -> RegionCandidates:
    """The candidates of a region; the last member names it: two heads may begin with one view."""
    last = planner.region.members[-1][0]
    original = planner.original.region.members[-1][0] if planner.original else ""
    how = optional, whole_first, original, planner.names
    return RegionCandidates(last, tuple(plans.items()), *how)


# ---- attention and blocks ----------------------------------------------------------------------
def loops_over_heads(options: Options, limit: Limit) -> bool:
    """Whether attention may run in loops: where a budget may ask for less memory."""
    return not limit.is_free and options.chunk in ("auto", "blocks", "heads")


def may_have_blocks(joint: JointGraph, options: Options, limit: Limit) -> bool:
    """Whether blocks may be of use. With a key for each query they need more than loops over heads:
    all keys, values and their gradients are as large as what such loops hold."""
    if not loops_over_heads(options, limit) or options.chunk == "heads":
        return False
    return options.chunk == "blocks" or any(map(shares_keys, joint.nodes))


def all_candidates(
    joint: JointGraph,
    options: Options,
    limit: Limit,
    with_blocks: bool,
    runner: PassRunner,
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of all regions."""
    candidates, rejections = find_candidates(joint, options, limit, runner)
    if not loops_over_heads(options, limit):
        return candidates, rejections
    if with_blocks:
        with runner.left_out("detection of blocks"):
            blocks, refused_blocks = block_candidates(joint, options)
            candidates = _with_blocks(candidates, blocks, alone=options.chunk == "blocks")
            rejections = [*rejections, *refused_blocks]
    members = {joint.by_name[name] for candidate in candidates for name in candidate.members}
    taken = {node for node in members if not ops.is_cheap_view(node)}
    with runner.left_out("detection of attention"):
        attention, refused = attention_candidates(joint, options, taken)
        candidates, rejections = [*candidates, *attention], [*rejections, *refused]
    return candidates, rejections


def block_candidates(
    joint: JointGraph, options: Options
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of every block, and what was refused. Changes nothing."""
    blocks, rejections = detect_blocks(joint, find_regions(joint)[0])
    candidates, refused = _with_attention(joint, blocks, options)
    return candidates, [*dict.fromkeys((*rejections, *refused))]


def _with_attention(
    joint: JointGraph, regions: Sequence[Region], options: Options
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The plans in which attention's results are kept, and those in which they are not."""
    found, refused = list[RegionCandidates](), list[Rejection]()
    for region, planner in planners_of(joint, regions, options).items():
        members = (joint.by_name[name] for name, _ in region.members)
        products = frozenset(node.name for node in members if ops.is_matmul(node))
        plans: dict[Mode, ChunkPlan] = {}
        for mode, (text, length) in itertools.product((SAVE, RECOMPUTE), _lengths(region).items()):
            plan = planner.plan(mode, products, length)
            if isinstance(plan, Rejection):
                refused.append(plan)
            elif plan not in plans.values():
                plans[Mode(plan.mode, wide=region.kind == BLOCK, chunks=text)] = plan
        if plans:
            optional = not region.unbounded
            found.append(candidates_of(planner, plans, optional, optional))
    return found, refused


def _lengths(region: Region) -> dict[str, str | int]:
    """The lengths of chunks that are offered, or their numbers, each as the mode says it."""
    if region.kind == BLOCK:
        return {USUAL: USUAL, SHORT: SHORT}
    total = region.num_tokens
    if region.axis == HEADS:
        groups = [count for count in _GROUPS if total % count == 0] or [total]
        return {f"{count} groups": count for count in groups}
    # chunks of rows, all of one length, which is of whole blocks of the kernels
    divisors = [n for n in range(_BLOCK, total // 2 + 1, _BLOCK) if total % n == 0]
    lengths = {next((n for n in divisors if n >= least), None) for least in _LEAST_ROWS}
    chunks = sorted(total // length for length in lengths if length is not None)
    return {f"{count} chunks of {region.axis}": count for count in chunks}


def _with_blocks(
    candidates: Sequence[RegionCandidates], blocks: Sequence[RegionCandidates], alone: bool
) -> list[RegionCandidates]:
    """The candidates with those of blocks in the place of their MLPs', or beside them."""
    found = []
    inside: set[str] = set()
    for block in blocks:
        computed = _computed_in(block)
        mlps = [c for c in candidates if not computed.isdisjoint(_computed_in(c))]
        inside |= computed
        if len(mlps) == 1 and not alone:
            (mlp,) = mlps
            block = dataclasses.replace(mlp, plans=(*mlp.plans, *block.plans))
        found.append(block)
    return [*(c for c in candidates if inside.isdisjoint(_computed_in(c))), *found]


def _computed_in(candidate: RegionCandidates) -> set[str]:
    """The names of the members that belong to a region alone."""
    return {name for name, spec in candidate.members.items() if spec != WHOLE}


def attention_candidates(
    joint: JointGraph, options: Options, taken: Set[fx.Node] = frozenset()
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of every attention, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    regions, rejections = detect_attention(joint, taken)
    masked, of_masks = detect_masked_attention(joint, taken)
    candidates: list[RegionCandidates] = []
    each, refused = _with_attention(joint, [*regions, *masked], options)
    for found in each:
        others = [c for c in candidates if _share_attention(joint, c, found)]
        if not others:
            candidates.append(found)
        elif others[0].plans[0][1].bytes_before < found.plans[0][1].bytes_before:
            candidates[candidates.index(others[0])] = found
    return candidates, [*rejections, *of_masks, *refused]


def _share_attention(joint: JointGraph, a: RegionCandidates, b: RegionCandidates) -> bool:
    """Whether two regions hold the same attention."""
    return any(is_attention(joint.by_name[name]) for name in a.members.keys() & b.members.keys())
