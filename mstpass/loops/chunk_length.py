"""How many tokens one chunk of a region's loops holds.

Three rules decide it, with N tokens in all:

1. *Long enough for matrix products to be fast.* The costs of the device (graph/device_costs.py)
   say how much longer the region's products take in chunks of c rows. A chunk must not be so short
   that its products take more than a tolerable time, and should not be so short that
   the loop takes ``GOOD`` times as long as the whole.
2. *Short enough to save memory.* Chunks are made shorter, as far as rule 1 allows, until the
   buffers of one chunk take at most ``_BUFFERED_SHARE`` of what exists at full length in any case,
   the loop's sliced inputs and outputs::

       c <= share * N * stacked_bytes / buffered_bytes

   Shorter chunks would hardly lower the peak. For the least memory the share is half of that; of
   loops through attention, which are long, the least share that rule 1 allows.
   Long chunks, for steps that have no time to lose, are the shortest that take at most ``_LONG``
   times as long as the whole, or as the fastest chunks, instead of ``GOOD``. Chunks whose sums are
   kept in 16 bits are as many as the error of these sums allows (plans.py). Before a loop over
   sections, chunks need no more than these; but the loop over tokens takes at most twice as long as
   in one piece.
3. *Equal, and whole multiples.* If the chunk length does not divide N, the last chunk overlaps the
   one before it, and masks leave the repeated rows out of every sum. Up to a third more chunks are
   taken if they are then equal and the loop becomes at most ``_OVERLAP_TIME`` slower. On a GPU,
   chunk lengths are multiples of 16, for aligned rows. On a CPU, they are where chunks overlap
   anyway, as long as that makes no difference to their number.

If N varies from batch to batch, the length chosen here is the most that a chunk may hold: the loop
makes the chunks of each batch equal. It is chosen for the largest batch that takes the plan; if
nothing is known of that, for one of many tokens, and rule 3 does not ask for equal chunks.
"""

from __future__ import annotations

import math

from mstpass.graph.advice import DIVIDING_CHUNKS, MORE_ROWS, SMALLER_CHUNKS
from mstpass.graph.attention import mask_of
from mstpass.graph.axes import FEATURES, QUERIES
from mstpass.graph.device_costs import GOOD, Costs
from mstpass.graph.gpu_costs import least_rows
from mstpass.graph.joint import nbytes
from mstpass.graph.loop_work import LoopWork, loop_work
from mstpass.graph.sizes import hint_shape
from mstpass.graph.tokens import Refusal
from mstpass.loops.region_facts import RegionFacts, members_of
from mstpass.loops.region_loops import RegionLoops
from mstpass.loops.sections import Sections
from mstpass.options import Options
from mstpass.plans import MOST_CHUNKS_IN_16_BITS, Chunks

# What tells modes of one kind apart (``Mode.chunks``)
USUAL, SHORT, LONG = "", "short chunks", "long chunks"
FEW = "16-bit sums"  # in few chunks
SHORTEST = "shortest chunks"  # for loops whose sums are small
_LONG = 1.01
_BUFFERED_SHARE = 0.5
# The extra time of a loop whose last chunk overlaps, as a fraction. A head of d=256, V=32000,
# N=2048 took 1.08 times Inductor's time in 6 chunks of 342 rows, 1.04 in 8 of 256 and in 4 of 512
# (medians of 15 rounds, 2 CPU cores, 2026-11-21).
_OVERLAP_TIME = 0.05
_MULTIPLE = 16
_BLOCK = 128  # features: lengths of sections are multiples of it
_COUNTS = 0.04  # of a section's memory and its gradients: what is worth the time of shorter ones
_LONGER = 7 / 6  # sections may be so much longer where they take less time
# Limits of the time of a loop over tokens before one over sections, and of one in the shortest
# chunks, relative to one piece.
_OVER_TOKENS = {USUAL: 1.3, SHORT: 2.0, SHORTEST: 2.0}
_SECTIONS = {USUAL: 1.1, SHORT: 1.3}  # limits of a loop's time over sections, relative to one piece
_MANY_TOKENS = 2**16  # of a batch to choose by, where the token count varies


class ChunkLengths:
    """The lengths of chunks of one region's loops."""

    def __init__(self, facts: RegionFacts, options: Options):
        self.facts, self.given, self.costs = facts, options.chunk_tokens, facts.costs

    def of_tokens(
        self, loops: RegionLoops, sections: Sections | None, length: str | int
    ) -> Chunks | Refusal:
        """The chunks of a region's loops, or why there are no two of them.

        Args:
            sections: the backward loop of mixed mode.
            length: ``USUAL``; ``SHORT``, as short as rule 1 allows for products; ``LONG``; ``FEW``;
                or ``SHORTEST``, as short as before sections. A number of equal chunks is given as
                it is.
        """
        region = self.facts.region
        axis, total = region.axis, region.num_tokens
        if isinstance(length, int):
            return Chunks(axis, total, total // length, length)
        work = self.facts.work_of(loops.loops)
        if axis == FEATURES:
            specs = self.facts.specs
            widest = next(n for n, spec in specs.items() if spec and self.facts.is_widest(n))
            tokens = math.prod(hint_shape(widest.meta["val"])) // total  # of the traced batch
            bytes_of = loops.buffered_bytes, loops.stacked_bytes
            return self._sections(tokens, work, total, *bytes_of, length)
        tokens_of_chunk = self._chunk_length(work, loops, sections, length)
        if isinstance(tokens_of_chunk, Refusal):
            return tokens_of_chunk
        if not region.symbolic and total % tokens_of_chunk and any(map(mask_of, self.facts.specs)):
            # its kernels would add up the gradients of keys and values by rows in two chunks twice
            what = f"{total} tokens do not divide into chunks of {tokens_of_chunk} queries"
            return Refusal(DIVIDING_CHUNKS(f"{what}, which attention with a mask needs"))
        count = math.ceil(total / tokens_of_chunk)
        return Chunks(axis, total, tokens_of_chunk, count, region.symbolic)

    def _chunk_length(
        self, work: LoopWork, loops: RegionLoops, sections: Sections | None, length: str
    ) -> int | Refusal:
        """Tokens in a chunk."""
        region, given, costs = self.facts.region, self.given, self.costs
        tokens, unbounded = region.num_tokens, region.unbounded
        if given is not None:
            if given >= tokens and not unbounded:
                reason = f"{tokens} tokens fit in one chunk of chunk_tokens={given}"
                return Refusal(SMALLER_CHUNKS(reason))
            count = math.ceil(tokens / given)
            if length == FEW and count > MOST_CHUNKS_IN_16_BITS:
                return Refusal(f"{count} chunks are too many for sums in 16 bits")
            return given
        if unbounded:
            work = work.over(max(tokens, _MANY_TOKENS))
        fewest = least_rows(costs.slowdown, work, costs.tolerable)
        good = max(fewest, least_rows(costs.relative_time, work, GOOD))
        share = _BUFFERED_SHARE
        if length == SHORT:
            good, share = fewest, 0.0 if region.axis == QUERIES else share / 2
        if unbounded and tokens < 2 * good:
            return good  # this batch is too short to choose by; a later one may be long
        if tokens < 2 * fewest:
            reason = (
                f"{tokens} tokens are fewer than two chunks of {fewest} rows; shorter chunks would "
                f"slow down matrix products on {self.facts.device.type}"
            )
            return Refusal(MORE_ROWS(reason))
        if length == FEW:
            return _rounded(tokens, MOST_CHUNKS_IN_16_BITS, costs.grain)
        wanted = int(tokens * share * loops.stacked_bytes / max(1, loops.buffered_bytes))
        num_chunks = max(2, min(math.ceil(tokens / max(1, wanted)), tokens // good))
        if unbounded:
            return _rows(tokens, num_chunks, costs.grain)
        if sections is not None or length == SHORTEST:
            most = max(2, tokens // least_rows(costs.relative_time, work, _OVER_TOKENS[length]))
            wanted = most if sections is None else _chunks_below_backward(loops, sections)
            return _fastest_chunks(min(wanted, most), most, work, costs)
        if length == LONG:
            return _long_chunks(num_chunks, work, costs)
        return _equal_chunks(num_chunks, work, costs, fewest)

    def of_sections(self, sections: Sections, length: str | int) -> Chunks | Refusal:
        """The sections of the backward loop of mixed mode."""
        facts, total = self.facts, sections.count
        members = members_of(facts.joint, sections.loop)
        work = loop_work(facts.joint, members, FEATURES, total)
        wide_bytes = sum(nbytes(n) for n in facts.buffered if members.get(n))
        kept_bytes = sum(map(nbytes, sections.gradients))
        tokens = facts.region.num_tokens
        return self._sections(tokens, work, total, wide_bytes, kept_bytes, length)

    def _sections(
        self,
        tokens: int,
        work: LoopWork,
        total: int,
        wide_bytes: int,
        kept_bytes: int,
        length: str | int,
    ) -> Chunks | Refusal:
        """Sections of ``total`` features: the fewest in one that take a tolerable time; or, if
        ``chunk_tokens`` is given, as many as have the elements of these in all features.

        Args:
            wide_bytes: size of the values of all sections.
            kept_bytes: size of what exists beside a section in any case.
            length: if ``SHORT``, they are shorter if that saves memory that counts.
        """
        if self.given is not None:
            features = math.ceil(total / math.ceil(tokens / self.given))
            return _of_features(total, features)
        one_piece_us, per_feature = self.costs.whole_us(work), work.tokens // total
        times_us = {
            n: self.costs.loop_us(work, n * per_feature) for n in range(_BLOCK, total, _BLOCK)
        }

        def shortest(limit: float) -> int:
            fewest = next((n for n, us in times_us.items() if us <= limit * one_piece_us), total)
            return min(
                (n for n in times_us if fewest <= n <= _LONGER * fewest),
                key=times_us.__getitem__,
                default=total,
            )

        features = shortest(_SECTIONS[USUAL])
        if length == SHORT:
            shorter, feature_bytes = shortest(_SECTIONS[SHORT]), wide_bytes / total
            saved_bytes = feature_bytes * (features - shorter)
            if saved_bytes > _COUNTS * (kept_bytes + feature_bytes * features):
                features = shorter
        return _of_features(total, features)


def _of_features(total: int, length: int) -> Chunks | Refusal:
    if length >= total:
        return Refusal(f"{total} features are too few for several sections")
    return Chunks(FEATURES, total, length, -(-total // length))


def _rows(tokens: int, num_chunks: int, grain: int) -> int:
    """The length of this many chunks: a multiple of ``grain``."""
    return grain * math.ceil(tokens / num_chunks / grain)


def _chunks_below_backward(loops: RegionLoops, sections: Sections) -> int:
    """The fewest chunks with which the forward of mixed mode has no higher peak than its backward.

    The wide values of a chunk, and their gradients, are then as large as the weights' gradients.
    """
    gradient_bytes = sum(map(nbytes, sections.gradients))
    return max(2, math.ceil(2 * loops.buffered_bytes / gradient_bytes))


def _fastest_chunks(fewest: int, most: int, work: LoopWork, costs: Costs) -> int:
    """The length of ``fewest`` chunks, or of up to twice as many if these take less time."""
    counts = range(fewest, min(2 * fewest, most) + 1)
    lengths = {_rounded(work.tokens, count, costs.grain) for count in counts}
    return min(lengths, key=lambda rows: (costs.relative_time(work, rows), rows))


def _equal_chunks(num_chunks: int, work: LoopWork, costs: Costs, fewest_rows: int) -> int:
    """The length of a few more chunks if that makes them equal, otherwise of as many as given."""
    tokens = work.tokens

    def time(rows: int) -> float:
        return costs.relative_time(work, rows)

    given = _rows(tokens, num_chunks, costs.grain)
    limit = time(given) + _OVERLAP_TIME
    most = max(num_chunks, min(num_chunks * 4 // 3, tokens // fewest_rows))
    for count in range(num_chunks, most + 1):
        rows = _rows(tokens, count, costs.grain)
        if tokens % rows == 0 and time(rows) <= limit:
            return rows
    rounded = _rows(tokens, num_chunks, _MULTIPLE)
    return rounded if math.ceil(tokens / rounded) == num_chunks else given


def _long_chunks(most: int, work: LoopWork, costs: Costs) -> int:
    """The length of as many chunks as hardly take longer than the whole, ``most`` at most."""
    lengths = [_rounded(work.tokens, count, costs.grain) for count in range(2, most + 1)]
    times = [costs.relative_time(work, rows) for rows in lengths]
    limit = max(_LONG, min(times))
    return min(rows for rows, time in zip(lengths, times, strict=True) if time <= limit)


def _rounded(tokens: int, num_chunks: int, grain: int) -> int:
    """The length of so many chunks: equal ones or, where chunks overlap, of aligned rows."""
    exact, rounded = (_rows(tokens, num_chunks, g) for g in (grain, _MULTIPLE))
    is_as_many = math.ceil(tokens / rounded) == num_chunks
    return rounded if tokens % exact and is_as_many else exact
