"""A benchmark's outcome as data, shown on the terminal and written to Markdown, JSON and CSV.

The figures of contenders: one row each, and the cells, tables and targets that rows make.

mst's report estimates the time of a plan beyond that of the step without loops. That step is taken
to run as long as Inductor's, so the estimate stands beside the measured time relative to Inductor::

    deviation  =  estimated / measured - 1
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import mstpass
from mstpass.measure import Timing, device_name

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


# ---- figures of contenders -----------------------------------------------------------------------
DEVIATION_LIMIT = 0.15  # of an estimated time
PEAKS_AND_TIMES = ("", "peak MiB", "peak / Inductor", "time s", "time / Inductor", "estimated")
ROUNDS = "Time: median ratio to Inductor over interleaved rounds (least-greatest)."


@dataclass
class Row:
    """The figures of one contender.

    Attributes:
        value_error, gradient_error: largest relative errors against the first contender.
        simulated_bytes, saved_bytes: the peak, and what is saved for backward, in mst's report;
            None for other backends.
        estimated: the time relative to the step without loops, by mst's report.
        plan: mst's loops, as text.
        axes: what each of them runs along, as text.
        error: why the contender has dropped out; empty if it has not.
    """

    name: str
    value: float | None = None
    value_error: float | None = None
    gradient_error: float | None = None
    first_call_s: float | None = None
    peak_bytes: int | None = None
    simulated_bytes: int | None = None
    saved_bytes: int | None = None
    estimated: float | None = None
    seconds: list[float] = field(default_factory=list)
    plan: str = ""
    axes: str = ""
    error: str = ""

    @property
    def median_s(self) -> float | None:
        return None if self.error or not self.seconds else Timing(tuple(self.seconds)).median_s


def write_plan(row: Row, reports: Sequence[mstpass.Report]) -> None:
    """Write what mst plans for a step to its row; the estimates, if it is one graph."""
    row.plan, row.axes = plan_text(reports), axes_text(reports)
    if len(reports) == 1:
        row.simulated_bytes, extra_time = reports[0].peak_bytes, reports[0].extra_time
        row.saved_bytes = reports[0].saved_bytes
        row.estimated = None if extra_time is None else 1 + extra_time


def plan_text(reports: Iterable[mstpass.Report]) -> str:
    """The loops of plans: what they compute, their mode, and the number of their chunks."""
    regions = (region for report in reports for region in report.regions)
    return ", ".join(f"{r.kind} {r.mode} in {r.num_chunks}" for r in regions)


def axes_text(reports: Iterable[mstpass.Report]) -> str:
    """The axis and the number of chunks of every loop: ``mixed: tokens in 4, features in 8``.

    Regions with the same loops are counted: ``3 x fused: tokens in 4``.
    """
    regions = (region for report in reports for region in report.regions)
    texts = Counter(
        f"{r.mode}: " + ", ".join(f"{loop.cut.axis} in {loop.cut.count}" for loop in r.loops)
        for r in regions
    )
    return "; ".join(text if count == 1 else f"{count} x {text}" for text, count in texts.items())


def ratios(row: Row | None, base: Row) -> Ratio | None:
    """Median, least and greatest ratio of two contenders' times, taken round by round."""
    if row is None or row.median_s is None or base.median_s is None:
        return None
    if len(row.seconds) != len(base.seconds):
        return None
    each = [a / b for a, b in zip(row.seconds, base.seconds, strict=True)]
    return Timing(tuple(each)).median_s, min(each), max(each)


def time_ratio(row: Row | None, base: Row) -> float | None:
    """The median ratio of two contenders' times."""
    found = ratios(row, base)
    return found and found[0]


def peak_ratio(row: Row | None, base: Row) -> float | None:
    return quotient(row.peak_bytes, base.peak_bytes) if row is not None else None


def deviation(row: Row, base: Row) -> float | None:
    """Of the estimated time; None if a row has no estimate or no time."""
    measured_ratio = time_ratio(row, base)
    if measured_ratio is None or row.estimated is None or row.error:
        return None
    return row.estimated / measured_ratio - 1


def estimate_cell(row: Row, base: Row) -> str:
    """The estimated time, and in brackets its deviation: ``1.08x (-3 %)``."""
    off = deviation(row, base)
    text = times_cell(row.estimated)
    return text if off is None else f"{text} ({100 * off:+.0f} %)"


CELLS: Mapping[str, Callable[[Row, Row], str]] = {  # by column; of a row and of Inductor's
    "": lambda row, base: row.name,
    "peak MiB": lambda row, base: mib_cell(row.peak_bytes),
    "peak / Inductor": lambda row, base: times_cell(peak_ratio(row, base)),
    "time s": lambda row, base: seconds_cell(row.median_s),
    "time / Inductor": lambda row, base: row.error or ratio_cell(ratios(row, base)),
    "estimated": estimate_cell,
    "chunks": lambda row, base: row.plan,
}


def steps_table(
    title: str,
    rows: Iterable[Row],
    base: Row,
    columns: Sequence[str] = PEAKS_AND_TIMES,
    own: Mapping[str, Callable[[Row], str]] | None = None,
) -> Table:
    """A table of contenders; ``base`` is Inductor's row.

    Args:
        columns: those of `CELLS`, and those of ``own``, in their order.
        own: cells of columns that only this table has.
    """
    own = own or {}

    def cell(name: str, row: Row) -> str:
        return own[name](row) if name in own else CELLS[name](row, base)

    lines = (tuple(cell(name, row) for name in columns) for row in rows)
    return Table(title, tuple(columns), tuple(lines))


def peak_and_time_targets(
    what: str, row: Row, base: Row, peak_limit: float, time_limit: float
) -> list[Target]:
    """Limits of a row's peak and time relative to another's; ``what`` has ``{}`` for the figure."""
    return [
        Target(what.format("peak"), peak_ratio(row, base), peak_limit),
        Target(what.format("time"), time_ratio(row, base), time_limit),
    ]


def judge_estimates(result: Result, what: str, rows: Iterable[Row], base: Row) -> None:
    """Add the largest deviation of these rows' estimated times to the targets."""
    found = [abs(off) for row in rows if (off := deviation(row, base)) is not None]
    if found:
        target = Target(f"{what}: |estimated / measured - 1|", max(found), DEVIATION_LIMIT)
        result.targets.append(target)


def records(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    return [vars(row) for row in rows.values()]
