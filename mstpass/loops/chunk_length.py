"""How many tokens one chunk of a region's loops holds.

Three rules decide it, with N tokens in all:

1. *Long enough for matrix products to be fast.* The measured costs of the device
   (graph/device_costs.py) say how much longer products take in chunks of c rows. A chunk must not
   be so short that its products take ``TOLERABLE`` times as long as whole ones, and should not be
   so short that the loop takes ``GOOD`` times as long as the whole.
2. *Short enough to save memory.* Chunks are made shorter, as far as rule 1 allows, until the
   buffers of one chunk take at most ``_BUFFERED_SHARE`` of what exists at full length in any case,
   the loop's sliced inputs and outputs::

       c <= share * N * stacked_bytes / buffered_bytes

   Shorter chunks would hardly lower the peak. For the least memory the share is half of that.
3. *Equal.* If the chunk length does not divide N, the last chunk overlaps the one before it, and
   masks leave the repeated rows out of every sum. Up to a third more chunks are taken if they are
   then equal and the loop becomes at most ``_OVERLAP_TIME`` slower.

If N varies from batch to batch, the loop makes the chunks of each batch equal, so rule 3 does not
apply; the length chosen here is the most that a chunk may hold.
"""

from __future__ import annotations

import math

from mstpass.graph.device_costs import GOOD, TOLERABLE, ChunkCosts, costs_of
from mstpass.graph.joint import tensors_of
from mstpass.graph.tokens import Refusal
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.region_loops import RegionLoops
from mstpass.options import Options

_BUFFERED_SHARE = 0.5
# The extra time of a loop whose last chunk overlaps, as a fraction. A head of d=256, V=32000,
# N=2048 took 1.08 times Inductor's time in 6 chunks of 342 rows, 1.04 in 8 of 256 and in 4 of 512
# (medians of 15 rounds, 2 CPU cores, 2026-11-21).
_OVERLAP_TIME = 0.05


def chunk_length(
    facts: RegionFacts, loops: RegionLoops, options: Options, short: bool = False
) -> int | Refusal:
    """Tokens in a chunk, or why the region's tokens do not make two chunks.

    Args:
        short: as short as rule 1 allows for products, for the least memory.
    """
    tokens, symbolic = facts.region.num_tokens, facts.region.symbolic
    given = options.chunk_tokens
    if given is not None:
        if given >= tokens and not symbolic:
            return Refusal(f"{tokens} tokens fit in one chunk of chunk_tokens={given}")
        return given
    device = next(tensors_of(facts.joint.by_name[facts.region.name].meta["val"])).device
    costs = costs_of(device)
    fewest = costs.least_rows(math.inf, TOLERABLE)
    good = max(fewest, costs.least_rows(facts.flops_per_token, GOOD))
    share = _BUFFERED_SHARE
    if short:
        good, share = fewest, share / 2
    if symbolic and tokens < 2 * good:
        return good  # this batch is too short to choose by; a later one may be long
    if tokens < 2 * fewest:
        return Refusal(
            f"{tokens} tokens are fewer than two chunks of {fewest} rows; shorter chunks would "
            f"slow down matrix products on {device.type}"
        )
    wanted = int(tokens * share * loops.stacked_bytes / max(1, loops.buffered_bytes))
    num_chunks = max(2, min(math.ceil(tokens / max(1, wanted)), tokens // good))
    if not symbolic:
        num_chunks = _equal_chunks(num_chunks, tokens, facts.flops_per_token, costs, fewest)
    return math.ceil(tokens / num_chunks)


def _equal_chunks(
    num_chunks: int, tokens: int, flops_per_token: float, costs: ChunkCosts, fewest_rows: int
) -> int:
    """A few more chunks if that makes them equal, otherwise as many as given."""

    def time(count: int) -> float:
        return costs.relative_time(math.ceil(tokens / count), flops_per_token)

    limit = time(num_chunks) + _OVERLAP_TIME
    most = min(num_chunks * 4 // 3, tokens // fewest_rows)
    equal = (n for n in range(num_chunks, most + 1) if tokens % n == 0 and time(n) <= limit)
    return next(equal, num_chunks)
