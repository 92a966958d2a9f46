"""What every benchmark shares: its command line, tables, targets, and the files they go to."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mstpass.errors import require
from mstpass.measure import cpu_name

MIB = 2**20
_DASH = "-"
_BUSY = """On CPUs that are busy with other work as well, set OMP_WAIT_POLICY=passive: threads that
spin while they wait for one another cost more than what is measured."""

# options that only some benchmarks have
_OWN: dict[str, dict[str, Any]] = {
    "large": {"action": "store_true", "help": "the larger model"},
    "store": {"action": "store_true", "help": "keep the measured chunk costs"},
    "problem": {"action": "append", "default": [], "help": "only this one; repeat"},
    "model": {"action": "append", "default": [], "help": "only this one; repeat"},
    "csv": {"type": Path, "metavar": "PATH", "help": "every point's figures"},
    "plots": {"type": Path, "metavar": "DIR", "help": "peak against time, as PNG"},
}


@dataclass(frozen=True)
class Arguments:
    """A benchmark's command line."""

    repeats: int
    quick: bool
    device: torch.device
    large: bool = False
    store: bool = False
    json: Path | None = None
    markdown: Path | None = None
    problem: Sequence[str] = ()
    model: Sequence[str] = ()
    csv: Path | None = None
    plots: Path | None = None


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Target:
    """A number that must not be above its limit; no number is a miss."""

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
    """A benchmark's outcome: tables and targets to read, records to compute with."""

    name: str
    title: str
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: dict[str, Any] = field(default_factory=dict)


class Progress:
    """A bar on a terminal; elsewhere nothing but the tables appears."""

    def __init__(self, title: str, total: int):
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[what]}"),
        )
        self._bar = progress.Progress(*columns, transient=True)
        self._task = self._bar.add_task(title, total=total, what="")

    def __enter__(self) -> Callable[[str], None]:
        self._bar.start()
        return lambda what: self._bar.update(self._task, advance=1, what=what)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def main(
    name: str,
    runs: Sequence[Callable[[Arguments], Result]],
    argv: Sequence[str],
    *,
    description: str,
    examples: str,
    own: Sequence[str] = (),
) -> int:
    """Run, print, write; 0 even where a target is missed or a contender fails: the rows say it.

    `own` names the options that not every benchmark has.
    """
    arguments = parse(name, argv, description, examples, own)
    require(("rich",), "bench", f"mstpass bench {name}")
    results: list[Result] = []
    for run in runs:
        results.append(run(arguments))
        show(results[-1], arguments.device)
        if arguments.markdown is not None:
            write_markdown(arguments.markdown, results[-1], arguments)
        if arguments.json is not None:
            write_json(arguments.json, results, arguments)
    return 0


def parse(
    name: str,
    argv: Sequence[str],
    description: str,
    examples: str,
    own: Sequence[str] = (),
) -> Arguments:
    parser = argparse.ArgumentParser(
        prog=f"mstpass bench {name}",
        description=description,
        epilog=f"examples:\n{examples}\n{_BUSY}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--repeats", type=_count, help="timed rounds (default 5, --quick 2)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    for option in own:
        parser.add_argument(f"--{option}", **_OWN[option])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure there")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="PATH",
        help=f"write the tables into this file, between <!-- bench:{name} --> and "
        f"<!-- /bench:{name} -->, or at its end where it has no such marks; the documentation's "
        "pages are in docs/results/",
    )
    given = parser.parse_args(argv)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    repeats = given.repeats or (2 if given.quick else 5)
    return Arguments(
        repeats=repeats,
        quick=given.quick,
        device=device,
        json=given.json,
        markdown=given.markdown,
        **{option: getattr(given, option) for option in own},
    )


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


def markdown(result: Result, arguments: Arguments) -> str:
    today = datetime.date.today().isoformat()
    lines = [f"**{result.title}.** {today}, {machine(arguments.device)}."]
    lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    for table in result.tables:
        lines += ["", f"{table.title}:", "", _cells(table.columns)]
        lines.append("|" + "|".join(["---", *["---:"] * (len(table.columns) - 1)]) + "|")
        lines += [_cells(row) for row in table.rows]
    if result.targets:
        lines += ["", *(f"- {target}" for target in result.targets)]
    return "\n".join(lines) + "\n"


def write_markdown(path: Path, result: Result, arguments: Arguments) -> None:
    """Replace what is between the benchmark's marks; without marks, append both to the file."""
    begin, end = f"<!-- bench:{result.name} -->", f"<!-- /bench:{result.name} -->"
    section = f"{begin}\n\n{markdown(result, arguments)}\n{end}"
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8") if path.exists() else "# Measured\n"
    marked = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if marked.search(old):
        new = marked.sub(lambda _: section, old, count=1)
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    path.write_text(new, encoding="utf-8")


def write_json(path: Path, results: Sequence[Result], arguments: Arguments) -> None:
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(arguments.device),
        "repeats": arguments.repeats,
        "quick": arguments.quick,
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One line a record; the first one's keys are the columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def machine(device: torch.device) -> str:
    """Device and torch version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    policy = os.environ.get("OMP_WAIT_POLICY")
    return f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}" + (
        f", OMP_WAIT_POLICY={policy}" if policy else ""
    )


def ratio_cell(value: tuple[float, float, float] | None) -> str:
    """Median of the rounds' ratios, with the least and the greatest."""
    return _DASH if value is None else f"{value[0]:.2f}x ({value[1]:.2f}-{value[2]:.2f})"


def mib_cell(size: int | None) -> str:
    return _DASH if size is None else f"{size / MIB:.1f}"


def seconds_cell(value: float | None) -> str:
    return _DASH if value is None else f"{value:.3f}"


def quotient(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def times_cell(value: float | None) -> str:
    return _DASH if value is None else f"{value:.2f}x"


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
