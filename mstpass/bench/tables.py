"""A benchmark's outcome as data: tables, targets, and the texts of their cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
_NONE = "-"  # the text of a missing figure


@dataclass(frozen=True)
class Table:
    """A table of texts; the cells of the first column name the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Target:
    """A figure that must not be above its limit. A missing figure misses the target."""

    what: str
    value: float | None
    limit: float

    @property
    def met(self) -> bool:
        return self.value is not None and self.value <= self.limit

    def __str__(self) -> str:
        value = "no figure" if self.value is None else f"{self.value:.3f}"
        return (
            f"{self.what}: {value}, target <= {self.limit:.2f}: {'met' if self.met else 'missed'}"
        )


@dataclass
class Result:
    """The outcome of one benchmark.

    Attributes:
        name: the key in Markdown marks and JSON files.
        title: what was measured, with the sizes.
        notes: sentences that explain the tables.
        records: all figures, for JSON files.
    """

    name: str
    title: str
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: dict[str, Any] = field(default_factory=dict)


def ratio_cell(value: tuple[float, float, float] | None) -> str:
    """Text of a ratio: the median of the rounds, and in brackets the least and the greatest."""
    return _NONE if value is None else f"{value[0]:.2f}x ({value[1]:.2f}-{value[2]:.2f})"


def mib_cell(size: int | None) -> str:
    return _NONE if size is None else f"{size / MIB:.1f}"


def seconds_cell(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def quotient(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def times_cell(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}x"
