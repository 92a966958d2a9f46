"""From a region to its ``ChunkPlan``: its loops in a mode, and the length of their chunks.

A plan is made in three steps::

    mode, saved values  -> loops          region_loops.py
    loops, device costs -> chunk length   chunk_length.py
    both                -> bytes of the large values, before and after

A plan that would not lower those bytes is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import AS_MUCH_MEMORY, EQUAL_TOKENS, FEWER_SUMS, Advice
from mstpass.graph.alike import Alike
from mstpass.graph.axes import FEATURES
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.node_cost import total_flops
from mstpass.graph.recompute_rules import tag_of
from mstpass.graph.tokens import Refusal
from mstpass.loops.chunk_length import FEW, USUAL, ChunkLengths
from mstpass.loops.region_facts import LOW_PRECISION, RegionFacts
from mstpass.loops.region_loops import RegionLoops, region_loops
from mstpass.loops.sections import Sections, sections_of
from mstpass.options import Options
from mstpass.plans import AUTO, FLOAT32, INPUT, ChunkPlan, Chunks, Region, Rejection
from mstpass.problem.names import renamed
from mstpass.problem.problem import MIXED, MUST_SAVE, SAVE
from mstpass.regions.detect import RETURNED

_LARGE_SUMS = 64  # sums in 16 bits are worth it from this part of a region's large values on
_TRIED = 4  # regions that another one is compared with: the layers of a model are of few kinds

# Each loop computes the region's products again, and its body is compiled by itself.
_MOST_LOOPS = 16

Names = Mapping[str, str]  # of the nodes of a copy, by those of its original


class RegionPlanner:
    """Makes the plans of one region; what several of them have in common is found once.

    Args:
        original: the planner of a region that this one is equal to but for its names.
        names: the names of nodes here, by those of the original.
    """

    def __init__(
        self,
        joint: JointGraph,
        region: Region,
        options: Options,
        original: RegionPlanner | None = None,
        names: Names | None = None,
    ):
        self.joint, self.region, self.options = joint, region, options
        self.original, self.names = original, names or {}
        self._loops: dict[tuple[str, frozenset[str]], RegionLoops] = {}
        self._plans: dict[tuple[str, frozenset[str], str | int], ChunkPlan | Rejection] = {}

    @functools.cached_property
    def facts(self) -> RegionFacts:
        """What all plans have in common."""
        return RegionFacts(self.joint, self.region)

    @functools.cached_property
    def sections(self) -> Sections | Refusal:
        """The backward loop of mixed mode, or why there is none."""
        return sections_of(self.facts, self.region.fused)

    @property
    def has_sections(self) -> bool:
        """Whether the region may run in mixed mode."""
        return isinstance((self.original or self).sections, Sections)

    def plan(
        self, mode: str, may_recompute: frozenset[str] = frozenset(), length: str | int = USUAL
    ) -> ChunkPlan | Rejection:
        """The loops of the region in a mode, or why it gains nothing from them.

        Args:
            mode: the mode asked for; the plan's may differ, see ``region_loops``.
            may_recompute: names of matmuls that backward may compute again in save mode.
            length: of the chunks (chunk_length.py); with ``FEW``, sums are in 16 bits.
        """
        key = mode, may_recompute, length
        if key not in self._plans:
            found = self._of_original(*key) or self._plan(*key)
            self._plans[key] = (
                self._rejection(found.reason) if isinstance(found, Refusal) else found
            )
        return self._plans[key]

    def _of_original(
        self, mode: str, may_recompute: frozenset[str], length: str | int
    ) -> ChunkPlan | Rejection | None:
        """The plan of the region that this one is equal to, with the names of this one."""
        if self.original is None:
            return None
        old = frozenset(name for name, new in self.names.items() if new in may_recompute)
        found = self.original.plan(mode, old, length)
        if isinstance(found, ChunkPlan):
            return renamed_plan(found, self.names, self.region.source)
        return dataclasses.replace(found, node=self.region.name, source=self.region.source)

    def _plan(
        self, mode: str, may_recompute: frozenset[str], length: str | int
    ) -> ChunkPlan | Refusal:
        facts, region = self.facts, self.region
        sections = self.sections if mode == MIXED else None
        if isinstance(sections, Refusal):
            return sections
        accumulate = INPUT if length == FEW else self._asked
        loops = self._loops_of(mode, may_recompute, sections).summing(accumulate)
        if len(loops.loops) > _MOST_LOOPS:
            needs = f"it needs {len(loops.loops)} loops, more than {_MOST_LOOPS}"
            reason = f"{needs}: each value that is reduced over all tokens ends one"
            return Refusal(FEWER_SUMS(reason))
        if not all(any(item.spec for item in loop.inputs) for loop in loops.loops):
            reason = "a loop would read constants only, and nothing with tokens"
            return Refusal(EQUAL_TOKENS(reason))
        lengths = ChunkLengths(facts, self.options)
        of_tokens: Chunks | Refusal | None = lengths.of_tokens(loops, sections, length)
        if isinstance(of_tokens, Refusal):
            if sections is None:
                return of_tokens
            of_tokens, loops = None, dataclasses.replace(loops, loops=())  # the forward is whole
            sections = sections_of(facts, fused=False)
            if isinstance(sections, Refusal):
                return sections
        in_chunks = [dataclasses.replace(loop, chunks=of_tokens) for loop in loops.loops]
        if sections is not None:
            of_sections = lengths.of_sections(sections, length)
            if isinstance(of_sections, Refusal):
                return of_sections
            how: dict[str, Any] = {"accumulate": accumulate, "chunks": of_sections}
            in_chunks.append(dataclasses.replace(sections.loop, **how))
        chunks = in_chunks[0].cut
        kept = {*loops.saved, *(self.joint.by_name[name] for name in region.returned)}
        of_one_chunk = facts.bytes_before * min(chunks.length, chunks.total) // chunks.total
        bytes_after = sum(map(nbytes, kept)) + of_one_chunk
        forced = region.unbounded or self.options.chunk_tokens is not None
        if isinstance(length, str) and not forced and bytes_after >= facts.bytes_before:
            reason = f"a loop of {chunks.count} chunks would hold as much memory as no loop"
            if region.returned:
                returned = RETURNED[region.kind]
                return Refusal(Advice(returned.advice)(f"{returned}: {reason}"))
            return Refusal(AS_MUCH_MEMORY(reason))
        return ChunkPlan(
            kind=region.kind,
            mode=loops.mode,
            source=region.source,
            num_tokens=chunks.total,
            chunk_tokens=chunks.length,
            num_chunks=chunks.count,
            bytes_before=facts.bytes_before,
            bytes_after=bytes_after,
            loops=tuple(in_chunks),
            saved=tuple(node.name for node in loops.saved),
            members=region.members,
            note=region.note,
            symbolic=chunks.symbolic,
            unbounded=region.unbounded,
            axis=chunks.axis,
        )

    def with_16_bit_sums(
        self,
        mode: str,
        may_recompute: frozenset[str] = frozenset(),
        other: ChunkPlan | None = None,
    ) -> ChunkPlan | None:
        """The loops with sums over chunks in 16 bits; None where that is ruled out, or in vain.

        The sums are then half as large as in float32, and a chunk is larger. Where the number of
        tokens has no bound, that of chunks has none, so sums are in float32.

        Args:
            other: the loops in the same mode with sums in float32; None if there are none.
        """
        if self.options.accumulate != AUTO or self.region.unbounded:
            return None
        if mode == MIXED or self.region.axis == FEATURES:
            return None  # what sections sum is the gradient of narrow values
        plan = self.plan(mode, may_recompute, FEW)
        if not isinstance(plan, ChunkPlan):
            return None
        larger = plan.chunk_tokens - other.chunk_tokens if other else 0
        larger_bytes = plan.bytes_before * larger // plan.num_tokens
        least_bytes = max(larger_bytes, plan.bytes_before // _LARGE_SUMS)
        return plan if self._bytes_in_16_bits(plan) > least_bytes else None

    def accumulates_as_asked(self, plan: ChunkPlan) -> bool:
        """Whether sums are in the dtype of the option, which is float32 unless that says more."""
        return all(loop.accumulate == self._asked for loop in plan.loops)

    @property
    def _asked(self) -> str:
        return INPUT if self.options.accumulate == INPUT else FLOAT32

    def _bytes_in_16_bits(self, plan: ChunkPlan) -> int:
        """Size of the 16-bit results that the loops sum over chunks."""
        names = {item.node for x in plan.loops for item in x.outputs if item.spec is None}
        nodes = (self.joint.by_name[name] for name in names)
        low = (n for n in nodes if (v := value_of(n)) is not None and v.dtype in LOW_PRECISION)
        return sum(map(nbytes, low))

    def _loops_of(
        self, mode: str, may_recompute: frozenset[str], sections: Sections | None
    ) -> RegionLoops:
        key = mode, may_recompute
        if key not in self._loops:
            self._loops[key] = region_loops(self.facts, *key, sections)
        return self._loops[key]

    def _rejection(self, reason: str) -> Rejection:
        region = self.region
        return Rejection("plan", region.name, reason, region.source, self.facts.bytes_before)


# ---- regions that are equal but for names (graph/alike.py) -------------------------------------
class Originals:
    """The regions of one graph that are no copies of others."""

    def __init__(self, joint: JointGraph):
        self.joint, self.alike = joint, joint.cached(Alike)
        self.regions: list[Region] = []

    def of(self, region: Region) -> tuple[Region, Names] | None:
        """The region that this one is a copy of; None if it is the first of its kind.

        What is computed before a loop is not next to its region, and not compared.
        """
        if region.prelude:
            return None
        for original in self.regions[-_TRIED:]:
            names = self._names(original, region)
            if names is not None:
                return original, names
        self.regions.append(region)
        return None

    def _names(self, original: Region, region: Region) -> Names | None:
        if len(original.members) != len(region.members):
            return None
        node = self.joint.by_name
        part = {node[name] for name, _ in original.members}
        last, others_last = (node[each.members[-1][0]] for each in (original, region))
        found = self.alike.as_in(part, last, others_last)
        if found is None:
            return None
        names = {one.name: other.name for one, other in found.items()}
        copy = renamed(original, lambda name: names.get(name, name))
        return names if dataclasses.replace(copy, source=region.source) == region else None


def renamed_plan(plan: ChunkPlan, names: Names, source: str) -> ChunkPlan | None:
    """The plan of a region for a copy of it; None if it has nodes that are not next to the region.

    A loop may read what a view next to the region shows.
    """
    used = {*(name for name, _ in plan.members), *plan.saved}
    for loop in plan.loops:
        used.update(loop.members, (item.node for item in loop.inputs))
    if not used <= names.keys():
        return None
    return dataclasses.replace(renamed(plan, lambda name: names.get(name, name)), source=source)


def planners_of(
    joint: JointGraph, regions: Iterable[Region], options: Options
) -> dict[Region, RegionPlanner]:
    """A planner for each region: regions that are alike are planned once."""
    originals = Originals(joint)
    planners: dict[Region, RegionPlanner] = {}
    for region in regions:
        original, names = originals.of(region) or (None, None)
        of_original = planners[original] if original is not None else None
        planners[region] = RegionPlanner(joint, region, options, of_original, names)
    return planners


# ---- extra time of the free plan ---------------------------------------------------------------
# Spend the free plan's extra time where it frees the most memory: on matmul results of MLPs.
#
# A region in save mode keeps the results of its forward matmuls for backward. Each of them that its
# backward loop computes again instead costs time, and saves the bytes of the result. The extra time
# of a matmul is estimated as its share of the step's floating point operations, times
# ``_SLOWDOWN``. Matmuls are taken by bytes saved for each operation, the best first, while the time
# allows it: all those of a region together or, if no region can be taken as a whole, single ones.
_SLOWDOWN = 1.25  # of a recomputed matmul: memory traffic, and products of few rows


def matmuls_to_recompute(
    joint: JointGraph, plans: Sequence[ChunkPlan], free_overhead: float
) -> list[frozenset[str]]:
    """For each plan the names of the saved matmul results that backward may compute again.

    Args:
        free_overhead: the extra time allowed, as a fraction of the step's.
    """
    left = free_overhead * total_flops(joint.nodes)
    chosen = [frozenset[str]()] * len(plans)
    whole = [(i, _saved_matmuls(joint, p)) for i, p in enumerate(plans) if p.mode == SAVE]
    single = [(i, [node]) for i, nodes in whole for node in nodes]
    for candidates in (whole, single):
        # Regions that save nothing have the same loops, and share their code. A region that saves
        # a part has loops of its own to compile, so it comes only if no region fits as a whole.
        if any(chosen):
            break
        for i, nodes in sorted(candidates, key=lambda pair: -_bytes_per_flop(pair[1])):
            cost = _SLOWDOWN * total_flops(nodes)
            if nodes and cost <= left:
                left -= cost
                chosen[i] |= {n.name for n in nodes}
    return chosen


def _saved_matmuls(joint: JointGraph, plan: ChunkPlan) -> list[fx.Node]:
    """The saved matmul results, but for those that the user's checkpointing saves."""
    saved = map(joint.by_name.__getitem__, plan.saved)
    return [n for n in saved if ops.is_matmul(n) and tag_of(n) != MUST_SAVE]


def _bytes_per_flop(nodes: Sequence[fx.Node]) -> float:
    return sum(map(nbytes, nodes)) / max(1, total_flops(nodes))
