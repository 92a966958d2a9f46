"""The memory that steps of other lengths take: the curve of a row, for a picture.

Peaks are affine in the length over long stretches, so a few lengths tell the rest. Short lengths,
at which the optimizer's step is the peak, all take the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from mstpass.planner.longest_sequence import START, rounded
from mstpass.planner.result import Point

UP_TO = 2  # curves end near this multiple of the device's memory
_PARTS = (32, 16, 8, 4, 2)  # shorter lengths: the row's, divided by these
_FLAT = 1.02  # sizes up to this factor apart are those of one flat part
_LONGER = 0.5  # of the way from the row's length to the last: a length between them


def curve(
    bytes_at: Callable[[int], int], length: int, most_bytes: int, fixed_bytes: int
) -> tuple[Point, ...]:
    """Points of the curve of ``bytes_at``, the shortest length first.

    Args:
        bytes_at: bytes at the peak of a step.
        length: the longest length that fits on the device; 0 where none fits.
        most_bytes: the bytes of the last step.
        fixed_bytes: what the device holds beside a step.
    """
    last = length or START
    lengths = sorted({rounded(last // part) for part in _PARTS} | {last})
    found = {n: bytes_at(n) for n in lengths}
    slope = (found[last] - found[lengths[-2]]) / max(1, last - lengths[-2])
    if slope > 0 and most_bytes > found[last]:
        further = (most_bytes - found[last]) / slope
        lengths += [rounded(last + _LONGER * further), rounded(last + further)]
        found |= {n: bytes_at(n) for n in lengths[-2:]}
    if bend := _bend(found, lengths):
        found[bend] = bytes_at(bend)
    sizes = itertools.accumulate((found[n] for n in sorted(found)), max)
    return tuple(Point(n, fixed_bytes + size) for n, size in zip(sorted(found), sizes, strict=True))


def _bend(found: Mapping[int, int], lengths: Sequence[int]) -> int:
    """The length from which on longer sequences take more; 0 where it is not between lengths."""
    least = found[lengths[0]]
    for before, one, other in zip(lengths, lengths[1:], lengths[2:], strict=False):
        if found[one] > _FLAT * least:
            slope = (found[other] - found[one]) / (other - one)
            bend = rounded(one - (found[one] - least) / slope) if slope > 0 else 0
            return bend if before < bend < one else 0
    return 0


def length_within(points: Sequence[Point], total_bytes: float) -> float | None:
    """The longest length within ``total_bytes``, on the lines between points.

    None where not even the first point fits, or all do.
    """
    if not points or not points[0].total_bytes <= total_bytes <= points[-1].total_bytes:
        return None
    for one, other in reversed(list(itertools.pairwise(points))):
        if one.total_bytes <= total_bytes:
            width = max(1, other.total_bytes - one.total_bytes)
            share = min(1.0, (total_bytes - one.total_bytes) / width)
            return one.length + share * (other.length - one.length)
    return float(points[0].length)
