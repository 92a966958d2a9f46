"""A benchmark's outcome as data, shown on the terminal and written to Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mstpass.measure import device_name

MIB = 2**20
NONE = "-"  # the text of a missing figure
Ratio = tuple[float, float, float]  # of times: the median, the least and the greatest of the rounds
T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A table of texts; the cells of the first column name the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(title: str, rows: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> Table:
        """A table of any rows, with what makes the text of a row's cell for each column."""
        lines = (tuple(cell(row) for cell in columns.values()) for row in rows)
        return Table(title, tuple(columns), tuple(lines))


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
        outcome = "met" if self.met else "missed"
        return f"{self.what}: {value}, target <= {self.limit:.2f}: {outcome}"


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


# ---- texts of cells ----------------------------------------------------------------------------
def text_of(value: T | None, text: Callable[[T], str]) -> str:
    """The text of a figure that may be missing."""
    return NONE if value is None else text(value)


def ratio_cell(value: Ratio | None) -> str:
    """Text of a ratio: the median of the rounds, and in brackets the least and the greatest."""
    return text_of(value, lambda each: "{:.2f}x ({:.2f}-{:.2f})".format(*each))


def mib_cell(size: int | None) -> str:
    return text_of(size, lambda size: f"{size / MIB:.1f}")


def seconds_cell(value: float | None) -> str:
    return text_of(value, "{:.3f}".format)


def times_cell(value: float | None) -> str:
    return text_of(value, "{:.2f}x".format)


def quotient(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


# ---- terminal and files ------------------------------------------------------------------------
def show(result: Result, device: torch.device) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if os.isatty(1) else 160, highlight=False)
    console.rule(f"{result.title}; {machine(device)}")
    for table in result.tables:
        shown = RichTable(title=table.title, title_justify="left")
        shown.add_column(table.columns[0])
        for column in table.columns[1:]:
            shown.add_column(column, justify="right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for target in result.targets:
        console.print(f"  {target}", style="green" if target.met else "bold red")
    for note in result.notes:
        console.print(f"  {note}", markup=False)


def markdown(result: Result, device: torch.device) -> str:
    lines = [f"**{result.title}.** {today()}, {machine(device)}."]
    lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    for table in result.tables:
        lines += ["", f"{table.title}:", "", *table_lines(table)]
    if result.targets:
        lines += ["", *(f"- {target}" for target in result.targets)]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """A table in Markdown."""
    marks = "|" + "|".join(["---", *["---:"] * (len(table.columns) - 1)]) + "|"
    return [_cells(table.columns), marks, *(_cells(row) for row in table.rows)]


def write_markdown(path: Path, result: Result, device: torch.device) -> None:
    """Write a benchmark's tables between its marks in a file."""
    old = path.read_text(encoding="utf-8") if path.exists() else "# Measured\n"
    _write(path, with_section(old, result.name, markdown(result, device)))


def with_section(text: str, name: str, section: str) -> str:
    """Replace what is between the marks of a benchmark; without marks, append both to the text."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    marked = f"{begin}\n\n{section}\n{end}"
    old = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if old.search(text):
        return old.sub(lambda _: marked, text, count=1)
    return f"{text.rstrip()}\n\n{marked}\n"


def write_json(
    path: Path, results: Sequence[Result], device: torch.device, settings: Mapping[str, Any]
) -> None:
    record = {
        "date": today(),
        "machine": machine(device),
        **settings,
        "results": [
            {
                "name": result.name,
                "title": result.title,
                "targets": [{**vars(t), "met": t.met} for t in result.targets],
                **result.records,
            }
            for result in results
        ],
    }
    _write(path, json.dumps(record, indent=1) + "\n")


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per record; the keys of the first record are the columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def machine(device: torch.device) -> str:
    """The device, the torch version and, on CPUs, the wait policy of OpenMP's threads."""
    policy = os.environ.get("OMP_WAIT_POLICY")
    with_policy = device.type == "cpu" and policy
    return device_name(device) + (f", OMP_WAIT_POLICY={policy}" if with_policy else "")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def today() -> str:
    return datetime.date.today().isoformat()
