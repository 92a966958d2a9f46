"""What `mstpass bench gpu` measures, as plain data: settings, cases, rows and their outcomes.

A *part* of the benchmark has *cases*, and a case has *rows*. The rows of a case run one after the
other in one process, and each is timed in turn with the case's first row. The outcome of a row is a
dict of plain data with at least a ``status`` and a ``text``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# the status of a row
MEASURED = "measured"
DRY = "dry"  # traced and planned, not run
FAILED = "failed"
SKIPPED = "skipped"  # what it needs is not installed
OUT_OF_MEMORY = "out of memory"
TOO_LONG = "took too long"
OUT_OF_TIME = "not run: out of time"  # a later call tries it again

Outcome = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all processes of one call know.

    Attributes:
        out: the folder of all results.
        quick: tiny sizes.
        dry: trace and plan, run nothing.
        memory_bytes: the memory that the search for the longest sequence may use.
    """

    out: Path
    quick: bool = False
    dry: bool = False
    memory_bytes: int = 24 * 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that one process measures side by side.

    Attributes:
        part: the name of its part.
        name: its name within the part, with its sizes.
        rows: the names of its rows; the most telling ones first, because time may run out.
        limit_s: the most seconds that one row may take.
    """

    part: str
    name: str
    rows: tuple[str, ...]
    limit_s: float

    def __post_init__(self) -> None:
        if not self.rows or len(set(self.rows)) != len(self.rows):
            raise ValueError(f"the rows of a case need different names: {self.rows}")


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a case already.

    Attributes:
        outcomes: by row.
        probes: by row, what was tried on the way to its outcome.
    """

    outcomes: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)
    probes: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)


def is_final(outcome: Outcome | None) -> bool:
    """Whether a later call need not try the row again."""
    return outcome is not None and outcome["status"] != OUT_OF_TIME
