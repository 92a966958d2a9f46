"""The modes in which attention may run in loops over groups of heads, each a chunk plan.

    save         the forward loop keeps attention's results; the backward loop computes the
                 projections again, and no attention
    recompute    the forward loop keeps nothing

Each is offered in two, four and eight groups, as far as the heads divide so. One group holds its
share of what attention needs besides the layer's input and output and their gradients, which exist
in full in any case: with more than eight groups that share hardly counts.

Where attention has a large mask that is computed, it may also run in loops over rows of queries,
which hold the mask's rows of one chunk (regions/masked_attention.py): *save* keeps its results, and
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
from collections.abc import Sequence, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import DIVIDING_CHUNKS
from mstpass.graph.attention import is_attention, is_product, mask_of, shares_keys
from mstpass.graph.axes import HEADS, QUERIES
from mstpass.graph.joint import JointGraph, nbytes
from mstpass.graph.tokens import WHOLE
from mstpass.limit import Limit
from mstpass.loops.candidate_modes import RegionCandidates, find_candidates, name_of
from mstpass.loops.chunk_length import SHORT, USUAL
from mstpass.loops.copies import Names, Originals, renamed_plan
from mstpass.loops.plan_region import RegionPlanner
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.region_loops import RegionLoops, region_loops
from mstpass.options import Options
from mstpass.passes.runner import PassRunner
from mstpass.plans import FLOAT32, INPUT, RECOMPUTE, SAVE, ChunkPlan, Chunks, Region, Rejection
from mstpass.regions.attention import detect_attention
from mstpass.regions.blocks import detect_blocks
from mstpass.regions.detect import find_regions
from mstpass.regions.masked_attention import detect_masked_attention

_GROUPS = (2, 4, 8)
_LEAST_ROWS, _BLOCK = (2048, 512), 32  # of queries in a chunk, long or short; of a kernel's block


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
    runner: PassRunner | None = None,
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of all regions."""
    runner = runner or PassRunner.of(options)
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
    accumulate = INPUT if options.accumulate == INPUT else FLOAT32
    with runner.left_out("detection of attention"):
        attention, refused = attention_candidates(joint, taken, accumulate)
        candidates, rejections = [*candidates, *attention], [*rejections, *refused]
    return candidates, rejections


def block_candidates(
    joint: JointGraph, options: Options
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of every block, and what was refused. Changes nothing."""
    blocks, rejections = detect_blocks(joint, find_regions(joint)[0])
    candidates = []
    for block in blocks:
        planner = RegionPlanner(joint, block, options)
        products = frozenset(node.name for node in planner.facts.specs if ops.is_matmul(node))
        plans: dict[str, ChunkPlan] = {}
        for mode, length in itertools.product((SAVE, RECOMPUTE), (USUAL, SHORT)):
            plan = _with_equal_chunks(planner, planner.plan(mode, products, length))
            if isinstance(plan, Rejection):
                rejections.append(plan)
            elif plan not in plans.values():
                plans[name_of(plan.mode, length)] = plan
        if plans:
            is_optional = not block.unbounded
            of_block = block.members[-1][0], tuple(plans.items()), is_optional, is_optional
            candidates.append(RegionCandidates(*of_block))
    return candidates, [*dict.fromkeys(rejections)]


def _with_equal_chunks(
    planner: RegionPlanner, plan: ChunkPlan | Rejection
) -> ChunkPlan | Rejection:
    """The plan of a block, unless attention with a mask would have rows in two chunks.

    Its kernels would add up the gradients of keys and values by such rows twice.
    """
    if isinstance(plan, Rejection) or plan.symbolic or plan.num_tokens % plan.chunk_tokens == 0:
        return plan
    if all(mask_of(node) is None for node in planner.facts.specs):
        return plan
    what = f"{plan.num_tokens} tokens do not divide into chunks of {plan.chunk_tokens} queries"
    reason = DIVIDING_CHUNKS(f"{what}, which attention with a mask needs")
    return Rejection("plan", planner.region.name, reason, plan.source, plan.bytes_before)


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
            named = tuple((f"{name}, block", plan) for name, plan in block.plans)
            block = dataclasses.replace(mlp, plans=(*mlp.plans, *named))
        found.append(block)
    return [*(c for c in candidates if inside.isdisjoint(_computed_in(c))), *found]


def _computed_in(candidate: RegionCandidates) -> set[str]:
    """The names of the members that belong to a region alone."""
    return {name for name, spec in candidate.members.items() if spec != WHOLE}


def attention_candidates(
    joint: JointGraph, taken: Set[fx.Node] = frozenset(), accumulate: str = FLOAT32
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of every attention, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
        accumulate: the dtype of sums over chunks, as ``LoopPlan`` has it.
    """
    regions, rejections = detect_attention(joint, taken)
    masked, refused = detect_masked_attention(joint, taken)
    originals = Originals(joint)
    known: dict[Region, RegionCandidates] = {}
    for region in regions:
        copy = originals.of(region)
        if copy is not None and (found := _copy(known[copy[0]], region, copy[1])):
            known[region] = found
        else:
            counts = _counts_of_heads(region)
            known[region] = _candidates(joint, region, counts, accumulate)
    candidates = [*known.values()]
    for region in masked:
        over_rows = _candidates(joint, region, _counts_of_rows(region), accumulate)
        over_heads = next((c for c in candidates if _share_attention(joint, c, over_rows)), None)
        if not over_rows.plans:
            continue
        if over_heads is None:
            candidates.append(over_rows)
        elif over_heads.plans[0][1].bytes_before < over_rows.plans[0][1].bytes_before:
            candidates[candidates.index(over_heads)] = over_rows
    return candidates, [*rejections, *refused]


def _copy(original: RegionCandidates, region: Region, names: Names) -> RegionCandidates | None:
    """The candidates of a region that is equal to another one but for names; None if their loops
    read more than is known to be equal."""
    plans: list[tuple[str, ChunkPlan]] = []
    for name, plan in original.plans:
        own = renamed_plan(plan, names, region)
        if own is None:
            return None
        plans.append((name, own))
    return dataclasses.replace(
        original,
        region=region.members[-1][0],
        plans=tuple(plans),
        original=original.region,
        names=names,
    )


def _share_attention(joint: JointGraph, a: RegionCandidates, b: RegionCandidates) -> bool:
    """Whether two regions hold the same attention."""
    members = [{name for _, plan in c.plans[:1] for name, _ in plan.members} for c in (a, b)]
    return any(is_attention(joint.by_name[name]) for name in members[0] & members[1])


def _counts_of_heads(region: Region) -> list[int]:
    return [count for count in _GROUPS if region.num_tokens % count == 0] or [region.num_tokens]


def _counts_of_rows(region: Region) -> list[int]:
    """The numbers of chunks: all rows are in chunks of one length, whole blocks of the kernels."""
    rows = region.num_tokens
    lengths = range(_BLOCK, rows // 2 + 1, _BLOCK)
    divisors = [length for length in lengths if rows % length == 0]
    chosen = {next((n for n in divisors if n >= least), None) for least in _LEAST_ROWS}
    return sorted(rows // length for length in chosen if length is not None)


def _candidates(
    joint: JointGraph, region: Region, counts: Sequence[int], accumulate: str
) -> RegionCandidates:
    """The plan of each mode, for each number of chunks."""
    facts = RegionFacts(joint, region)
    products = frozenset(node.name for node in facts.specs if ops.is_matmul(node))
    each = (region_loops(facts, m, products).summing(accumulate) for m in (SAVE, RECOMPUTE))
    modes = {mode.mode: mode for mode in each}
    what = "groups" if region.axis == HEADS else f"chunks of {region.axis}"
    plans = tuple(
        (f"{mode}, {count} {what}", plan_of_groups(facts, loops, count))
        for mode, loops in modes.items()
        for count in counts
    )
    return RegionCandidates(region.members[-1][0], plans, optional=True, whole_first=True)


def plan_of_groups(facts: RegionFacts, loops: RegionLoops, num_groups: int) -> ChunkPlan:
    """The loops of a region over this many groups of heads, or rows, all of the same size."""
    region = facts.region
    bytes_before = facts.bytes_before
    if region.axis == QUERIES:
        bytes_before = max(nbytes(node) for node in facts.specs if not is_product(node))
    chunks = Chunks(region.axis, region.num_tokens, region.num_tokens // num_groups, num_groups)
    return ChunkPlan(
        kind=region.kind,
        mode=loops.mode,
        source=region.source,
        num_tokens=region.num_tokens,
        chunk_tokens=region.num_tokens // num_groups,
        num_chunks=num_groups,
        bytes_before=bytes_before,
        bytes_after=sum(map(nbytes, loops.saved)) + bytes_before // num_groups,
        loops=tuple(loop.in_chunks(chunks) for loop in loops.loops),
        saved=tuple(node.name for node in loops.saved),
        members=region.members,
        note=region.note,
        axis=region.axis,
    )
