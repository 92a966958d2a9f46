"""Search for the longest sequence whose step fits, in few evaluations of its memory.

The memory that steps of other lengths take: the curve of a row, for a picture.

Peaks are affine in the length over long stretches, so a few lengths tell the rest. Short lengths,
at which the optimizer's step is the peak, all take the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from mstpass.planner.request import Point

GRAIN = 16  # lengths are multiples of it
TOLERANCE = 0.01  # a sequence that is longer by this fraction might still fit
START = 4096  # tokens: a first guess, where nothing is known
MOST = 2**24  # tokens; no longer sequence is tried
_EVALUATIONS = 24
_LEAP = 8  # a guess is at most this many times the last one
_SHRINK = 0.995  # where no length has fitted yet, the next one is shorter by at least this factor
_BELOW = 0.999  # of the length at which a line meets the limit: sizes are rounded
_TRUST = 1.5  # two plans may differ so that a line through their points leads far off
_PROBE = 0.5  # to confirm a length, the next guess is longer by this part of the tolerance


def longest(
    bytes_at: Callable[[int], int], limit_bytes: int, start: int, tolerance: float = TOLERANCE
) -> int:
    """The longest sequence with ``bytes_at(length) <= limit_bytes``, to within ``tolerance``.

    ``bytes_at`` must not decrease as the length grows. It is affine over long stretches, so each
    guess is where a line through two known points meets the limit.

    Args:
        tolerance: a fraction of the length; 0: to within ``GRAIN``.

    Returns:
        The length in tokens; 0 where no length fits.
    """
    fits, too_long = 0, MOST + GRAIN
    points: dict[int, int] = {}
    guess = rounded(start)
    for _ in range(_EVALUATIONS):
        points[guess] = bytes_at(guess)
        if points[guess] <= limit_bytes:
            fits = guess
        else:
            too_long = guess
        if too_long - fits <= max(GRAIN, tolerance * fits):
            break
        aim = crossing(points, limit_bytes, guess)
        if aim - fits < tolerance * fits:  # the longest so far is nearly the longest: confirm it
            aim = fits * (1 + tolerance * _PROBE) + GRAIN
        aim = min(aim, guess * _LEAP)
        if too_long <= MOST and not fits < aim < too_long:
            aim = (fits + too_long) / 2
        guess = min(max(rounded(aim), fits + GRAIN), too_long - GRAIN)
    return fits


def next_length(
    points: Mapping[int, int],
    limit_bytes: int,
    last: int,
    guess: float,
    tolerance: float = TOLERANCE,
) -> int | None:
    """The length to try after ``last``, where a longer step may need less memory than a shorter.

    So it is with steps that are planned anew for each length: chunks are whole numbers of tokens.

    Args:
        points: bytes by length, of all that were tried.
        guess: the length at which ``last`` leads to the limit, if nothing else is known.

    Returns:
        The length in tokens. None: the longest that fits is known to within ``tolerance``, or no
        shorter length is left.
    """
    fits = max((n for n, needed in points.items() if needed <= limit_bytes), default=0)
    too_long = min((n for n in points if n > fits), default=MOST)
    if fits and too_long in points:
        ends = {n: points[n] for n in (fits, too_long)}
        aim = crossing(ends, limit_bytes, fits)
    else:
        aim = guess if len(points) == 1 else crossing(points, limit_bytes, last)
        aim = min(max(aim, guess / _TRUST), guess * _TRUST)
    aim *= _BELOW
    if not fits:
        shortest = min(points)
        shorter = rounded(min(aim, _SHRINK * shortest))
        return shorter if shorter < shortest else None
    longer = max(rounded(aim), fits + GRAIN)
    return longer if (1 + tolerance) * fits < aim and longer < too_long else None


def crossing(points: Mapping[int, int], limit_bytes: int, last: int) -> float:
    """The length at which a line through two points meets the limit.

    The points are the last one and, of the others, the one nearest to the limit.
    """
    others = [length for length in points if length != last]
    if not others:
        return last * limit_bytes / max(1, points[last])
    other = min(others, key=lambda length: abs(points[length] - limit_bytes))
    slope = (points[last] - points[other]) / (last - other)
    if slope <= 0:
        return last * _LEAP if points[last] <= limit_bytes else last / _LEAP
    return last + (limit_bytes - points[last]) / slope


def rounded(length: float) -> int:
    """A multiple of ``GRAIN`` that is no longer, if there is one."""
    return max(GRAIN, int(length) // GRAIN * GRAIN)


# ---- curve ---------------------------------------------------------------------------------------
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
