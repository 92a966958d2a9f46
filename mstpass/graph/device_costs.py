"""How the time of a loop depends on the length of its chunks: measured, for each device.

Three things make a loop slower than the same computation in one piece:

- efficiency: a matmul with few rows leaves a part of the device idle;
- accumulators: every chunk reads and writes the gradient of the weight, which is a traffic of
  ``4 / rows`` bytes per floating point operation, whatever the shape of the weight;
- the loop itself: a constant time for each chunk.

The first two depend on the rows of a chunk alone. They are measured together, as a table of rows
and slowdowns. The third weighs more the less a chunk computes:

    relative time of a loop  =  slowdown(rows)  +  chunk_us / (rows * flops_per_row / flops_per_us)

``mstpass bench loops --store`` measures all three on the present device and stores them for every
later compilation on it.
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

# Limits of a loop's time relative to the computation in one piece:
GOOD = 1.05  # if there is a choice
TOLERABLE = 1.10  # at most, for the matmuls alone
_PATH_VARIABLE = "MSTPASS_COSTS"


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """The measurements of one device.

    Attributes:
        slowdown: pairs (rows of a chunk, time of the matmuls relative to one piece), by ascending
            rows. From twice the last rows on, the relative time is 1.
        chunk_us: the time in microseconds that the loop itself adds for each chunk.
        flops_per_us: the rate of matmuls in one piece.
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
        """The time of a loop over chunks of ``rows`` rows, relative to the time in one piece.

        Pass an infinite ``flops_per_row`` to leave out the time of the loop itself.
        """
        matmul_us = rows * flops_per_row / self.flops_per_us
        return self._slowdown(rows) + self.chunk_us / matmul_us

    def _slowdown(self, rows: int) -> float:
        """Interpolated linearly in 1 / rows, to which the accumulators' traffic is proportional."""
        points = [*self.slowdown, (2 * self.slowdown[-1][0], 1.0)]
        if rows <= points[0][0]:
            return 1 + (points[0][1] - 1) * points[0][0] / rows
        for (short, slow), (long, fast) in itertools.pairwise(points):
            if rows <= long:
                share = (1 / rows - 1 / long) / (1 / short - 1 / long)
                return max(1.0, fast + (slow - fast) * share)
        return 1.0

    def least_rows(self, flops_per_row: float, limit: float) -> int:
        """The smallest multiple of 16 rows for which the relative time is at most ``limit``."""
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
# Not measured: a cautious guess for a large GPU.
_ELSEWHERE = ChunkCosts(
    slowdown=((256, 1.4), (512, 1.2), (832, 1.08), (1024, 1.04), (2048, 1.01)),
    chunk_us=50.0,
    flops_per_us=2e8,
)


def costs_of(device: torch.device) -> ChunkCosts:
    """The stored measurements of this device, or else the defaults for its type."""
    stored = _stored(costs_path())
    return stored.get(device_name(device)) or (_CPU if device.type == "cpu" else _ELSEWHERE)


def device_name(device: torch.device) -> str:
    """The name under which the costs of a device are stored; of a CPU it tells the threads."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"


def costs_path() -> Path:
    """The file of stored costs: ``$MSTPASS_COSTS``, or one in the user's cache folder."""
    given = os.environ.get(_PATH_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(given or f"{cache}/mstpass/chunk-costs.json", os.environ.get("HOME"))


@functools.cache  # the costs are looked up for every matmul of a graph
def _expanded(path: str, _home: str | None) -> Path:
    """The path with ``~`` expanded; ``_home`` is a part of the cache's key."""
    return Path(path).expanduser()


def store(device: torch.device, costs: ChunkCosts) -> Path:
    """Write the costs of a device to the file, in place of older ones. Returns the file's path."""
    path = costs_path()
    known = {**_stored(path), device_name(device): costs}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: dataclasses.asdict(c) for name, c in known.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    _stored.cache_clear()
    return path


def fingerprint() -> str:
    """A hash of the stored costs. They decide chunk lengths, so caches of graphs depend on it."""
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
            "Run `mstpass bench loops --store` to write it anew.",
            stacklevel=2,
        )
        return {}
