"""From a region to its ``ChunkPlan``: its loops in a mode, and the length of their chunks.

A plan is made in three steps::

    mode, saved values  -> loops          region_loops.py, values_to_save.py
    loops, device costs -> chunk length   chunk_length.py
    both                -> bytes of the large values, before and after

A plan that would not lower those bytes is refused.
"""

from __future__ import annotations

import functools
import math

from mstpass.graph.joint import JointGraph, nbytes
from mstpass.graph.tokens import Refusal
from mstpass.loops.chunk_length import USUAL, chunk_length
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.region_loops import RegionLoops, region_loops
from mstpass.loops.vocabulary_sections import Sections, sections_of
from mstpass.options import Options
from mstpass.plans import ChunkPlan, Chunks, Region, Rejection

# Each loop computes the region's products again, and its body is compiled by itself.
_MOST_LOOPS = 16


class RegionPlanner:
    """Makes the plans of one region; what several of them have in common is found once."""

    def __init__(self, joint: JointGraph, region: Region, options: Options):
        self.facts, self.region, self.options = RegionFacts(joint, region), region, options
        self._loops: dict[tuple[str, frozenset[str]], RegionLoops] = {}

    @functools.cached_property
    def has_sections(self) -> bool:
        """Whether the region may run in mixed mode."""
        return isinstance(sections_of(self.facts), Sections)

    def plan(
        self, mode: str, may_recompute: frozenset[str] = frozenset(), length: str = USUAL
    ) -> ChunkPlan | Rejection:
        """The loops of the region in a mode, or why it gains nothing from them.

        Args:
            mode: the mode asked for; the plan's may differ, see ``region_loops``.
            may_recompute: names of matmuls that backward may compute again in save mode.
            length: of the chunks, as in ``chunk_length``.
        """
        facts, region = self.facts, self.region
        loops = self._loops_of(mode, may_recompute)
        if len(loops.loops) > _MOST_LOOPS:
            reason = f"it needs {len(loops.loops)} loops, more than {_MOST_LOOPS}"
            return self._rejection(f"{reason}: each value that is reduced over all tokens ends one")
        if not all(any(item.spec for item in loop.inputs) for loop in loops.loops):
            return self._rejection("a loop would read constants only, and nothing with tokens")
        chunk_tokens = chunk_length(facts, loops, self.options, length)
        if isinstance(chunk_tokens, Refusal):
            return self._rejection(chunk_tokens.reason)
        num_chunks = math.ceil(region.num_tokens / chunk_tokens)
        kept = {*loops.saved, *(facts.joint.by_name[name] for name in region.returned)}
        of_one_chunk = int(facts.bytes_before * min(1.0, chunk_tokens / region.num_tokens))
        bytes_after = sum(map(nbytes, kept)) + of_one_chunk
        forced = region.symbolic or self.options.chunk_tokens is not None
        if not forced and bytes_after >= facts.bytes_before:
            reason = f"a loop of {num_chunks} chunks would hold as much memory as no loop"
            if region.returned:
                reason = f"{region.note.partition(';')[0]}: {reason}"
            return self._rejection(reason)
        chunks = Chunks(region.axis, region.num_tokens, chunk_tokens, num_chunks, region.symbolic)
        return ChunkPlan(
            kind=region.kind,
            mode=loops.mode,
            source=region.source,
            num_tokens=region.num_tokens,
            chunk_tokens=chunk_tokens,
            num_chunks=num_chunks,
            bytes_before=facts.bytes_before,
            bytes_after=bytes_after,
            loops=tuple(loop.in_chunks(chunks) for loop in loops.loops),
            saved=tuple(node.name for node in loops.saved),
            members=region.members,
            note=region.note,
            symbolic=region.symbolic,
        )

    def _loops_of(self, mode: str, may_recompute: frozenset[str]) -> RegionLoops:
        key = mode, may_recompute
        if key not in self._loops:
            self._loops[key] = region_loops(self.facts, *key)
        return self._loops[key]

    def _rejection(self, reason: str) -> Rejection:
        region = self.region
        return Rejection("plan", region.name, reason, region.source, self.facts.bytes_before)
