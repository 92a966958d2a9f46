"""How long a chunk must be so that a loop costs little: per device, measured.

Three things make a loop slower than the whole:

- efficiency: a product of few rows leaves a part of the device idle;
- accumulators: every chunk reads and writes the weight gradient, which is traffic of
  ``4 / rows`` bytes a flop, whatever the weight's shape;
- the loop itself: a constant time for each chunk.

The first two depend on the rows alone and are measured together, as a table of rows and slowdowns;
the third weighs more the less a chunk computes. ``mstpass bench loops --store`` measures all of
them on the machine at hand, for every later compilation on it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import warnings
from pathlib import Path

import torch

GOOD = 1.05  # times the whole: what a loop may cost where there is a choice
TOLERABLE = 1.10  # what its products may cost at the most
_PATH_VARIABLE = "MSTPASS_COSTS"


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """Of one device.

    Attributes:
        slowdown: pairs of rows and time relative to the whole product, by ascending rows; beyond
            the last, 1.
        chunk_us: time of a chunk of nothing.
        flops_per_us: of whole products.
    """

    slowdown: tuple[tuple[int, float], ...]
    chunk_us: float
    flops_per_us: float

    def __post_init__(self) -> None:
        rows = [r for r, _ in self.slowdown]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"slowdown needs ascending rows, got {rows}")
        if not (self.chunk_us >= 0 and self.flops_per_us > 0):
            raise ValueError(f"chunk_us={self.chunk_us}, flops_per_us={self.flops_per_us}")

    def relative_time(self, rows: int, flops_per_row: float) -> float:
        """Of a loop over chunks of so many rows; 1 is the time of the whole.

        With ``flops_per_row`` infinite the loop's own time does not count.
        """
        own_us = rows * flops_per_row / self.flops_per_us
        return self._slowdown(rows) + self.chunk_us / own_us

    def _slowdown(self, rows: int) -> float:
        """Between two measured points linear in 1 / rows, as the accumulators' traffic is."""
        points = [*self.slowdown, (2 * self.slowdown[-1][0], 1.0)]
        if rows <= points[0][0]:
            return 1 + (points[0][1] - 1) * points[0][0] / rows
        for (short, slow), (long, fast) in itertools.pairwise(points):
            if rows <= long:
                share = (1 / rows - 1 / long) / (1 / short - 1 / long)
                return max(1.0, fast + (slow - fast) * share)
        return 1.0

    def least_rows(self, flops_per_row: float, limit: float) -> int:
        """The fewest rows, in steps of 16, with which a loop takes at most ``limit``."""
        low, high = 1, 2**16
        while low < high:
            middle = (low + high) // 2
            if self.relative_time(16 * middle, flops_per_row) <= limit:
                high = middle
            else:
                low = middle + 1
        return 16 * low


# Measured 2026-11-20 (medians of three sweeps) on 2 cores of an AMD EPYC, fp32, torch 2.13.
_CPU = ChunkCosts(
    slowdown=((64, 1.64), (128, 1.29), (256, 1.075), (512, 1.0)),
    chunk_us=600.0,
    flops_per_us=160_000.0,
)
# Not measured: what is cautious for a large GPU.
_ELSEWHERE = ChunkCosts(
    slowdown=((256, 1.4), (512, 1.2), (832, 1.08), (1024, 1.04), (2048, 1.01)),
    chunk_us=50.0,
    flops_per_us=2e8,
)


def costs_of(device: torch.device) -> ChunkCosts:
    """What was stored for this very device, else what is known of its kind."""
    stored = _stored(costs_path())
    return stored.get(device_name(device)) or (_CPU if device.type == "cpu" else _ELSEWHERE)


def device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"


def costs_path() -> Path:
    """``$MSTPASS_COSTS``, else ``mstpass/chunk-costs.json`` in the user's cache folder."""
    given = os.environ.get(_PATH_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(given or f"{cache}/mstpass/chunk-costs.json", os.environ.get("HOME"))


@functools.cache
def _expanded(path: str, home: str | None) -> Path:
    """Asked for every product of a graph; ``home`` decides what ``~`` is."""
    return Path(path).expanduser()


def store(device: torch.device, costs: ChunkCosts) -> Path:
    """Add a device's costs to the file, or replace them. Returns the file's path."""
    path = costs_path()
    known = {**_stored(path), device_name(device): costs}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: dataclasses.asdict(c) for name, c in known.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    _stored.cache_clear()
    return path


def fingerprint() -> str:
    """Of the stored costs: they decide chunk lengths, so no cache may outlive them."""
    stored = sorted((name, repr(costs)) for name, costs in _stored(costs_path()).items())
    return hashlib.sha256(repr(stored).encode()).hexdigest()[:16] if stored else ""


@functools.cache
def _stored(path: Path) -> dict[str, ChunkCosts]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        return {
            name: ChunkCosts(
                tuple((int(rows), float(slow)) for rows, slow in entry["slowdown"]),
                float(entry["chunk_us"]),
                float(entry["flops_per_us"]),
            )
            for name, entry in json.loads(text).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"mstpass ignores {path}: {type(error).__name__}: {error}. "
            "`mstpass bench loops --store` writes it anew.",
            stacklevel=2,
        )
        return {}
