"""Sizes for people."""

from __future__ import annotations


def bytes_text(size: float) -> str:
    """``"1.5 GiB"``, ``"41.7 MiB"``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if abs(size) >= unit or name == "MiB":
            return f"{size / unit:.1f} {name}"
    raise AssertionError
