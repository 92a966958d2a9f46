"""From a region to its ``ChunkPlan``: its loops in a mode, and the length of their chunks.

A plan is made in three steps::

    mode, saved values  -> loops          region_loops.py, values_to_save.py
    loops, device costs -> chunk length   chunk_length.py
    both                -> bytes of the large values, before and after

A plan that would not lower those bytes is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from mstpass.graph.advice import AS_MUCH_MEMORY, EQUAL_TOKENS, FEWER_SUMS, Advice
from mstpass.graph.axes import FEATURES
from mstpass.graph.joint import JointGraph, nbytes, value_of
from mstpass.graph.tokens import Refusal
from mstpass.loops.chunk_length import (
    FEW,
    USUAL,
    chunk_length,
    chunks_of_features,
    chunks_of_sections,
)
from mstpass.loops.copies import Names, Originals, renamed_plan
from mstpass.loops.region_facts import LOW_PRECISION, RegionFacts
from mstpass.loops.region_loops import RegionLoops, region_loops
from mstpass.loops.sections import Sections, sections_of
from mstpass.options import Options
from mstpass.plans import (
    AUTO,
    FLOAT32,
    INPUT,
    MIXED,
    ChunkPlan,
    Chunks,
    LoopPlan,
    Region,
    Rejection,
)
from mstpass.regions.make_region import RETURNED

_LARGE_SUMS = 64  # sums in 16 bits are worth it from this part of a region's large values on

# Each loop computes the region's products again, and its body is compiled by itself.
_MOST_LOOPS = 16


class RegionPlanner:
    """Makes the plans of one region; what several of them have in common is found once."""

    def __init__(self, joint: JointGraph, region: Region, options: Options):
        self.joint, self.region, self.options = joint, region, options
        self._loops: dict[tuple[str, frozenset[str]], RegionLoops] = {}
        self._plans: dict[tuple[str, frozenset[str], str], ChunkPlan | Rejection] = {}

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
        return isinstance(self.sections, Sections)

    def plan(
        self, mode: str, may_recompute: frozenset[str] = frozenset(), length: str = USUAL
    ) -> ChunkPlan | Rejection:
        """The loops of the region in a mode, or why it gains nothing from them.

        Args:
            mode: the mode asked for; the plan's may differ, see ``region_loops``.
            may_recompute: names of matmuls that backward may compute again in save mode.
            length: of the chunks, as in ``chunk_length``; with ``FEW``, sums are in 16 bits.
        """
        key = mode, may_recompute, length
        if key not in self._plans:
            self._plans[key] = self.uncached(*key)
        return self._plans[key]

    def uncached(
        self, mode: str, may_recompute: frozenset[str], length: str
    ) -> ChunkPlan | Rejection:
        sections = None
        if mode == MIXED:
            if isinstance(self.sections, Refusal):
                return self._rejection(self.sections.reason)
            sections = self.sections
        facts, region = self.facts, self.region
        accumulate = INPUT if length == FEW else self._asked
        loops = self._loops_of(mode, may_recompute, sections).summing(accumulate)
        if len(loops.loops) > _MOST_LOOPS:
            needs = f"it needs {len(loops.loops)} loops, more than {_MOST_LOOPS}"
            reason = f"{needs}: each value that is reduced over all tokens ends one"
            return self._rejection(FEWER_SUMS(reason))
        if not all(any(item.spec for item in loop.inputs) for loop in loops.loops):
            reason = "a loop would read constants only, and nothing with tokens"
            return self._rejection(EQUAL_TOKENS(reason))
        if region.axis == FEATURES:
            return self._over_features(loops, length)
        chunk_tokens = chunk_length(facts, loops, sections, self.options, length)
        if isinstance(chunk_tokens, Refusal):
            if mode == MIXED:
                return self._sections_alone(length)
            return self._rejection(chunk_tokens.reason)
        num_chunks = math.ceil(region.num_tokens / chunk_tokens)
        chunks = Chunks(region.axis, region.num_tokens, chunk_tokens, num_chunks, region.symbolic)
        kept = {*loops.saved, *(facts.joint.by_name[name] for name in region.returned)}
        of_one_chunk = int(facts.bytes_before * min(1.0, chunk_tokens / region.num_tokens))
        bytes_after = sum(map(nbytes, kept)) + of_one_chunk
        forced = region.unbounded or self.options.chunk_tokens is not None
        if not forced and bytes_after >= facts.bytes_before:
            advice = AS_MUCH_MEMORY
            reason = f"a loop of {num_chunks} chunks would hold as much memory as no loop"
            if region.returned:
                returned = RETURNED[region.kind]
                advice, reason = Advice(returned.advice), f"{returned}: {reason}"
            return self._rejection(advice(reason))
        in_chunks = tuple(loop.in_chunks(chunks) for loop in loops.loops)
        if sections is not None:
            of_sections = chunks_of_sections(facts, sections, self.options, length)
            if of_sections.count == 1:
                return self._too_few_features(of_sections)
            backward = dataclasses.replace(sections.loop, accumulate=accumulate)
            in_chunks = (*in_chunks, backward.in_chunks(of_sections))
        saved = tuple(node.name for node in loops.saved)
        return self._plan_of(loops.mode, chunks, in_chunks, bytes_after, saved)

    def _over_features(self, loops: RegionLoops, length: str) -> ChunkPlan | Rejection:
        """The loops of a region all of which run over features."""
        chunks = chunks_of_features(self.facts, loops, self.options, length)
        if chunks.count == 1:
            return self._too_few_features(chunks)
        in_chunks = tuple(loop.in_chunks(chunks) for loop in loops.loops)
        of_one = self.facts.bytes_before * chunks.length // chunks.total
        bytes_after = sum(map(nbytes, loops.saved)) + of_one
        saved = tuple(node.name for node in loops.saved)
        return self._plan_of(loops.mode, chunks, in_chunks, bytes_after, saved)

    def _sections_alone(self, length: str) -> ChunkPlan | Rejection:
        """The forward whole, for its tokens are too few, and the backward over sections."""
        sections = sections_of(self.facts, fused=False)
        if isinstance(sections, Refusal):
            return self._rejection(sections.reason)
        chunks = chunks_of_sections(self.facts, sections, self.options, length)
        if chunks.count == 1:
            return self._too_few_features(chunks)
        bytes_after = self.facts.bytes_before * chunks.length // chunks.total
        loop = dataclasses.replace(sections.loop, accumulate=self._asked, chunks=chunks)
        return self._plan_of(MIXED, chunks, (loop,), bytes_after)

    def _plan_of(
        self,
        mode: str,
        chunks: Chunks,
        loops: tuple[LoopPlan, ...],
        bytes_after: int,
        saved: tuple[str, ...] = (),
    ) -> ChunkPlan:
        region = self.region
        return ChunkPlan(
            kind=region.kind,
            mode=mode,
            source=region.source,
            num_tokens=chunks.total,
            chunk_tokens=chunks.length,
            num_chunks=chunks.count,
            bytes_before=self.facts.bytes_before,
            bytes_after=bytes_after,
            loops=loops,
            saved=saved,
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
        values = {name: value_of(self.joint.by_name[name]) for name in names}
        low = [name for name, v in values.items() if v is not None and v.dtype in LOW_PRECISION]
        return sum(nbytes(self.joint.by_name[name]) for name in low)

    def _loops_of(
        self, mode: str, may_recompute: frozenset[str], sections: Sections | None
    ) -> RegionLoops:
        key = mode, may_recompute
        if key not in self._loops:
            self._loops[key] = region_loops(self.facts, *key, sections)
        return self._loops[key]

    def _too_few_features(self, chunks: Chunks) -> Rejection:
        return self._rejection(f"{chunks.total} features are too few for several sections")

    def _rejection(self, reason: str) -> Rejection:
        region = self.region
        return Rejection("plan", region.name, reason, region.source, self.facts.bytes_before)


class CopyPlanner(RegionPlanner):
    """The plans of a region that is equal to another one but for its names."""

    def __init__(self, region: Region, original: RegionPlanner, names: Names):
        super().__init__(original.joint, region, original.options)
        self.original, self.names = original, names
        self._old_names = {new: old for old, new in names.items()}

    @property
    def has_sections(self) -> bool:
        return self.original.has_sections

    def uncached(
        self, mode: str, may_recompute: frozenset[str], length: str
    ) -> ChunkPlan | Rejection:
        old = frozenset(self._old_names[name] for name in may_recompute)
        found = self.original.plan(mode, old, length)
        if isinstance(found, Rejection):
            return dataclasses.replace(found, node=self.region.name, source=self.region.source)
        own = renamed_plan(found, self.names, self.region)
        return super().uncached(mode, may_recompute, length) if own is None else own


def planners_of(
    joint: JointGraph, regions: Iterable[Region], options: Options
) -> dict[Region, RegionPlanner]:
    """A planner for each region: regions that are alike are planned once."""
    originals = Originals(joint)
    planners: dict[Region, RegionPlanner] = {}
    for region in regions:
        copy = originals.of(region)
        if copy is None:
            planners[region] = RegionPlanner(joint, region, options)
        else:
            original, names = copy
            planners[region] = CopyPlanner(region, planners[original], names)
    return planners
