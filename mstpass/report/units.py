"""Sizes for people."""

from __future__ import annotations

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_text(size: float) -> str:
    """``"1.5 GiB"``, ``"41.7 MiB"``, ``"12 B"``."""
    for unit, name in _UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
