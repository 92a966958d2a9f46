"""The longest sequence whose step fits: a root of a function that is dear to evaluate."""

from __future__ import annotations

from collections.abc import Callable

GRAIN = 16  # lengths are multiples of it
TOLERANCE = 0.01  # of the length: how much longer might still fit
MOST = 2**24  # tokens: nobody trains longer ones
_EVALUATIONS = 24
_LEAP = 8  # times the last length, at the most
_PROBE = 0.5  # of the tolerance: how far beyond a fitting guess the next one lies


def longest(bytes_at: Callable[[int], int], limit_bytes: int, start: int) -> int:
    """The longest sequence with ``bytes_at(length) <= limit_bytes``, to within ``TOLERANCE``.

    ``bytes_at`` must not fall with the length. It is affine in long stretches, so the next guess is
    where a line through the last two points meets the limit. 0 where nothing fits.
    """
    fits, too_long = 0, MOST + GRAIN
    points: dict[int, int] = {}
    guess = _rounded(start)
    for _ in range(_EVALUATIONS):
        points[guess] = bytes_at(guess)
        if points[guess] <= limit_bytes:
            fits = guess
        else:
            too_long = guess
        if too_long - fits <= max(GRAIN, TOLERANCE * fits):
            break
        aim = _meets(points, limit_bytes, guess)
        if aim - fits < TOLERANCE * fits:  # it fits about as far as it can: show that
            aim = fits * (1 + TOLERANCE * _PROBE) + GRAIN
        aim = min(aim, guess * _LEAP)
        if too_long <= MOST and not fits < aim < too_long:
            aim = (fits + too_long) / 2
        guess = min(max(_rounded(int(aim)), fits + GRAIN), too_long - GRAIN)
    return fits


def _meets(points: dict[int, int], limit_bytes: int, last: int) -> float:
    """Where the line through the last point and the one nearest to the limit meets the limit."""
    others = [length for length in points if length != last]
    if not others:
        return last * limit_bytes / max(1, points[last])
    other = min(others, key=lambda length: abs(points[length] - limit_bytes))
    slope = (points[last] - points[other]) / (last - other)
    if slope <= 0:
        return last * _LEAP if points[last] <= limit_bytes else last / _LEAP
    return last + (limit_bytes - points[last]) / slope


def _rounded(length: int) -> int:
    return max(GRAIN, length // GRAIN * GRAIN)
