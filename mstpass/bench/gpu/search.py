"""The search for the longest sequence that fits, from what has been tried so far.

The search keeps no state of its own: it goes on wherever the tried lengths end. The first length is
the predicted one. The memory of a step is affine in the length over long stretches, so a next
length is where a line through what fitted meets the limit; where that fails, the interval between
the longest that fits and the shortest that does not is halved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

GRAIN = 256  # lengths are multiples of it
TOLERANCE = 0.03  # a sequence that is longer by this fraction might still fit
_MARGIN = 0.99  # a guess stays below the line by this factor: a length that fits says more
_LEAP = 4.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """One length that was tried.

    Attributes:
        peak_bytes: the highest number of allocated bytes; None where it did not fit.
        seconds: the time of a step.
        why: why it did not fit.
    """

    length: int
    fits: bool
    peak_bytes: int | None = None
    seconds: float | None = None
    why: str = ""

    def to_data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def best(probes: Sequence[Probe]) -> Probe | None:
    """The longest that fits."""
    return max((p for p in probes if p.fits), key=lambda p: p.length, default=None)


def next_length(
    probes: Sequence[Probe], start: int, limit_bytes: int, fixed_bytes: int, most: int
) -> int | None:
    """The length to try next; None if the longest that fits is known to within ``TOLERANCE``.

    Args:
        start: the length to try first.
        fixed_bytes: what the step holds at any length, such as the weights.
        most: no longer sequence is tried.
    """
    most = _rounded(most)
    if not probes:
        return min(_rounded(start), most)
    longest = best(probes)
    too_long = min((p.length for p in probes if not p.fits), default=most + GRAIN)
    if longest is None:
        return _rounded(too_long / _LEAP) if too_long > GRAIN else None
    if too_long - longest.length <= max(GRAIN, TOLERANCE * longest.length):
        return None
    aim = _crossing(probes, longest, limit_bytes, fixed_bytes) * _MARGIN
    aim = min(aim, longest.length * _LEAP)
    if aim - longest.length < TOLERANCE * longest.length:
        aim = longest.length * (1 + TOLERANCE)  # nearly the longest: confirm it
    if too_long <= most and aim >= too_long:
        aim = (longest.length + too_long) / 2
    return min(max(_rounded(aim), longest.length + GRAIN), too_long - GRAIN)


def _crossing(probes: Sequence[Probe], longest: Probe, limit_bytes: int, fixed_bytes: int) -> float:
    """The length at which the line through two points that fitted meets the limit.

    With one point, the other is the fixed bytes at no tokens.
    """
    assert longest.peak_bytes is not None, "the peak bytes are known"
    others = [p for p in probes if p.fits and p.length < longest.length]
    other = max(others, key=lambda p: p.length, default=Probe(0, True, fixed_bytes))
    assert other.peak_bytes is not None, "the peak bytes are known"
    slope = (longest.peak_bytes - other.peak_bytes) / (longest.length - other.length)
    if slope <= 0:
        return longest.length * _LEAP
    return longest.length + (limit_bytes - longest.peak_bytes) / slope


def _rounded(length: float) -> int:
    return max(GRAIN, int(length) // GRAIN * GRAIN)
