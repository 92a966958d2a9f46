"""What each region could do: its chunk plans, the one first that the options ask for.

Which of them runs, or none, is part of the partition problem (problem/modes.py).
"""

from __future__ import annotations

import dataclasses

from mstpass.graph.joint import JointGraph
from mstpass.loops.free_overhead import spend
from mstpass.loops.plan_region import Facts, plan_region, preferred_mode
from mstpass.options import Options
from mstpass.plans import RECOMPUTE, ChunkPlan, Rejection
from mstpass.regions.detect import detect

_SHORT = "{}, short chunks"


@dataclasses.dataclass(frozen=True)
class RegionCandidates:
    """Of one region: named plans, and whether it may stay whole, or does unless memory is asked."""

    region: str
    plans: tuple[tuple[str, ChunkPlan], ...]
    optional: bool
    whole_first: bool = False

    def __getitem__(self, name: str) -> ChunkPlan:
        return dict(self.plans)[name]


def find_candidates(
    joint: JointGraph, options: Options
) -> tuple[list[RegionCandidates], list[Rejection]]:
    """Of every region of the graph, and what was large but refused. Changes nothing."""
    regions, rejections = detect(joint)
    least = options.memory_budget == 0.0
    first: list[ChunkPlan] = []
    others: list[RegionCandidates] = []
    facts_of = {region.members: Facts(joint, region) for region in regions}
    for facts in facts_of.values():
        planned = plan_region(facts, options, preferred_mode(facts.region, options), short=least)
        if isinstance(planned, ChunkPlan):
            first.append(planned)
        elif found := _others(facts, options):
            others.append(found)
        else:
            rejections.append(planned)

    def replan(plan: ChunkPlan, repeat: frozenset[str]) -> ChunkPlan:
        facts = facts_of[plan.members]
        planned = plan_region(facts, options, plan.mode, repeat, short=least)
        return planned if isinstance(planned, ChunkPlan) else plan

    spent = spend(joint, first, options.free_overhead, replan)
    taken = [_choices(facts_of[p.members], p, options) for p in spent]
    return [*taken, *others], rejections


def _others(facts: Facts, options: Options) -> RegionCandidates | None:
    """A region for which only recomputing gains anything: what a budget may ask of it."""
    region = facts.region
    if not options.frees_memory_for_time or region.fused or region.returned:
        return None
    planned = plan_region(facts, options, RECOMPUTE)
    if not isinstance(planned, ChunkPlan):
        return None
    found = _choices(facts, planned, options)
    return dataclasses.replace(found, whole_first=found.optional)


def _choices(facts: Facts, first: ChunkPlan, options: Options) -> RegionCandidates:
    """A batch of any size may come to a symbolic region: it keeps its loops, as forced ones do."""
    region = facts.region
    plans = {first.mode: first}
    for short in (False, True):
        mode = first.mode if region.fused or region.returned else RECOMPUTE
        name = _SHORT.format(mode) if short else mode
        planned = plan_region(facts, options, mode, short=short)
        if isinstance(planned, ChunkPlan) and planned not in plans.values():
            plans.setdefault(name, planned)
    optional = options.chunk_tokens is None and not region.symbolic
    # Two heads may begin with the same view; what a region ends with is its own.
    return RegionCandidates(region.members[-1][0], tuple(plans.items()), optional)
