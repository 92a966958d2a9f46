"""Sizes in bytes as text, and text such as ``"24GiB"`` as bytes."""

from __future__ import annotations

import math
import re

_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(KiB|MiB|GiB|TiB)\s*")


def bytes_text(size: float, round_up: bool = False) -> str:
    """A size in the largest unit that it fills: ``"1.5 GiB"``, ``"41.7 MiB"``, ``"12 B"``.

    Args:
        round_up: to the next tenth of the unit, so that ``parse_bytes`` gives no smaller size.
    """
    for name, unit in _UNITS.items():
        if abs(size) >= unit:
            number = math.ceil(10 * size / unit) / 10 if round_up else size / unit
            return f"{number:.1f} {name}"
    return f"{size:.0f} B"


def parse_bytes(text: str) -> int | None:
    """``"24GiB"`` or ``"1.5 MiB"`` as bytes; None if the text is not a size with a unit."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
