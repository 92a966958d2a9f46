"""The modes in which attention may run in loops over groups of heads, each a chunk plan.

    save         the forward loop keeps attention's results; the backward loop computes the
                 projections again, and no attention
    recompute    the forward loop keeps nothing

Each is offered in two, four and eight groups, as far as the heads divide so. One group holds its
share of what attention needs besides the layer's input and output and their gradients, which exist
in full in any case: with more than eight groups that share hardly counts.

Without a budget attention stays whole: the loops compute its projections twice.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes
from mstpass.loops.candidate_modes import RegionCandidates, find_candidates
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.region_loops import RegionLoops, region_loops
from mstpass.options import Options
from mstpass.plans import RECOMPUTE, SAVE, ChunkPlan, Region, Rejection
from mstpass.regions.attention import detect_attention

_GROUPS = (2, 4, 8)


def loops_over_heads(options: Options) -> bool:
    """Whether attention may run in loops: where a budget may ask for less memory."""
    return options.frees_memory_for_time and options.chunk == "auto"


def all_candidates(
    joint: JointGraph, options: Options
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of all regions."""
    candidates, rejections = find_candidates(joint, options)
    if not loops_over_heads(options):
        return candidates, rejections
    plans = (candidate.plans[0][1] for candidate in candidates)
    members = {joint.by_name[name] for plan in plans for name, _ in plan.members}
    taken = {node for node in members if not ops.is_cheap_view(node)}
    attention, refused = attention_candidates(joint, taken)
    return [*candidates, *attention], [*rejections, *refused]


def attention_candidates(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """The candidates of every attention, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    regions, rejections = detect_attention(joint, taken)
    return [_candidates(joint, region) for region in regions], rejections


def _candidates(joint: JointGraph, region: Region) -> RegionCandidates:
    facts = RegionFacts(joint, region)
    products = frozenset(node.name for node in facts.specs if ops.is_matmul(node))
    modes = {
        mode.mode: mode for mode in (region_loops(facts, m, products) for m in (SAVE, RECOMPUTE))
    }
    counts = [count for count in _GROUPS if region.num_tokens % count == 0] or [region.num_tokens]
    plans = tuple(
        (f"{mode}, {count} groups", plan_of_groups(facts, loops, count))
        for mode, loops in modes.items()
        for count in counts
    )
    return RegionCandidates(region.members[-1][0], plans, optional=True, whole_first=True)


def plan_of_groups(facts: RegionFacts, loops: RegionLoops, num_groups: int) -> ChunkPlan:
    """The loops of a region over this many groups of heads, all of the same size."""
    region = facts.region
    return ChunkPlan(
        kind=region.kind,
        mode=loops.mode,
        source=region.source,
        num_tokens=region.num_tokens,
        chunk_tokens=region.num_tokens // num_groups,
        num_chunks=num_groups,
        bytes_before=facts.bytes_before,
        bytes_after=sum(map(nbytes, loops.saved)) + facts.bytes_before // num_groups,
        loops=loops.loops,
        saved=tuple(node.name for node in loops.saved),
        members=region.members,
        note=region.note,
        axis=region.axis,
    )
