"""The stage *detect*: the regions that can run in chunks, and the graph whose nodes they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from mstpass.graph.advice import NO_COMPILED_AUTOGRAD
from mstpass.graph.axes import FEATURES
from mstpass.graph.joint import JointGraph
from mstpass.limit import Limit
from mstpass.loops.candidate_modes import (
    RegionCandidates,
    all_candidates,
    loops_over_heads,
    may_have_blocks,
)
from mstpass.normalize import FOR_SECTIONS, normalized
from mstpass.normalize.masks_as_flags import WithoutMasks
from mstpass.normalize.products import made_in_vain
from mstpass.options import Options
from mstpass.partition.split import TORCH_BUDGET
from mstpass.passes.runner import PassRunner
from mstpass.plans import ChunkPlan, Rejection
from mstpass.problem.problem import MIXED
from mstpass.regions.blocks import KIND as BLOCK
from mstpass.torch_internals.aot_autograd import has_torch_budget

TRACED_AGAIN = NO_COMPILED_AUTOGRAD(
    "compiled autograd traces the backward again, and cannot trace a loop in it"
)


@dataclasses.dataclass(frozen=True)
class Detected:
    """The regions that can run in chunks, and the joint graph whose nodes they name.

    Attributes:
        notes: what was changed in the graph, as the report says it.
    """

    joint: JointGraph
    candidates: tuple[RegionCandidates, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()

    def with_masks(self, masks: WithoutMasks) -> Detected:
        """The same, with what was done about attention masks before."""
        rejections = (*masks.rejections, *self.rejections)
        return dataclasses.replace(self, rejections=rejections, notes=masks.notes)


def detect(
    joint: JointGraph,
    options: Options,
    limit: Limit,
    runner: PassRunner,
    loops_in_backward: bool = True,
    kept: Set[str] = frozenset(),
) -> Detected:
    """Find regions, in the joint graph as it is or in a normalized copy of it.

    The copy is used only if a region has a node that normalization changed. Otherwise the graph
    stays as it is, and the rejections are those of the copy, which name the remaining reasons.
    """
    how = joint, options, limit, runner, loops_in_backward, kept
    if not may_have_blocks(joint, options, limit):
        return _detect(*how, for_blocks=False)
    found = _detect(*how, for_blocks=True)
    if any(plan.kind == BLOCK for c in found.candidates for _, plan in c.plans):
        return found
    other = _detect(*how, for_blocks=False)
    refused = (*other.rejections, *found.rejections)
    return dataclasses.replace(other, rejections=tuple(dict.fromkeys(refused)))


def _detect(
    joint: JointGraph,
    options: Options,
    limit: Limit,
    runner: PassRunner,
    loops_in_backward: bool,
    kept: Set[str],
    for_blocks: bool,
) -> Detected:
    """What the options allow, in one form of the graph, with blocks or without."""
    if has_torch_budget(joint.nodes):  # torch wants it on every node, so on loops as well
        return Detected(joint, rejections=(Rejection("detect", "graph", TORCH_BUDGET),))
    if options.chunk == "off":
        return Detected(joint)
    for_heads = loops_over_heads(options, limit)

    def candidates_of(joint: JointGraph) -> tuple[list[RegionCandidates], list[Rejection]]:
        return all_candidates(joint, options, limit, for_blocks, runner)

    joint, prepared, changed = normalized(joint, for_heads, runner, kept, for_blocks)
    candidates, rejections = candidates_of(prepared)
    in_vain = made_in_vain(joint, prepared, names_of(candidates))
    if not in_vain <= kept:
        _, other, of_other = normalized(joint, for_heads, runner, kept | in_vain, for_blocks)
        if of_other != changed:
            prepared, changed = other, of_other
            candidates, others = candidates_of(prepared)
            rejections = [*dict.fromkeys((*others, *rejections))]
    if prepared is not joint and not any(changed.intersection(c.members) for c in candidates):
        prepared, (candidates, _) = joint, candidates_of(joint)
    if not limit.is_free and not all(map(_has_sections, candidates)):
        other, of_other = runner.run_all(FOR_SECTIONS, prepared)
        found, refused = candidates_of(other) if of_other else (candidates, [])
        if sum(map(_has_sections, found)) > sum(map(_has_sections, candidates)):
            prepared, candidates, rejections = other, found, refused
    if not loops_in_backward:
        in_backward = [c for c in candidates if not c.in_forward().plans]
        candidates = [c for c in map(RegionCandidates.in_forward, candidates) if c.plans]
        rejections += [rejected("detect", c.plans[0][1], TRACED_AGAIN) for c in in_backward]
    return Detected(prepared, tuple(candidates), tuple(rejections))


def names_of(candidates: Iterable[RegionCandidates]) -> set[str]:
    """The names of the members of all these regions."""
    return {name for candidate in candidates for name in candidate.members}


def _has_sections(candidate: RegionCandidates) -> bool:
    return any(plan.mode == MIXED or plan.axis == FEATURES for _, plan in candidate.plans)


def rejected(stage: str, plan: ChunkPlan, reason: str) -> Rejection:
    """Why the region of a plan has no loops."""
    return Rejection(stage, plan.members[0][0], reason, plan.source, plan.bytes_before)
