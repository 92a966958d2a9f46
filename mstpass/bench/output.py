"""Shows a benchmark's outcome on the terminal, and writes it into Markdown, JSON and CSV files."""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mstpass.bench.arguments import Arguments
from mstpass.bench.tables import Result, Table
from mstpass.measure import device_name


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
        lines += ["", f"{table.title}:", "", *table_lines(table)]
    if result.targets:
        lines += ["", *(f"- {target}" for target in result.targets)]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """A table in Markdown."""
    marks = "|" + "|".join(["---", *["---:"] * (len(table.columns) - 1)]) + "|"
    return [_cells(table.columns), marks, *(_cells(row) for row in table.rows)]


def write_markdown(path: Path, result: Result, arguments: Arguments) -> None:
    """Write a benchmark's tables between its marks in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8") if path.exists() else "# Measured\n"
    new = with_section(old, result.name, markdown(result, arguments))
    path.write_text(new, encoding="utf-8")


def with_section(text: str, name: str, section: str) -> str:
    """Replace what is between the marks of a benchmark; without marks, append both to the text."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    marked = f"{begin}\n\n{section}\n{end}"
    old = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if old.search(text):
        return old.sub(lambda _: marked, text, count=1)
    return f"{text.rstrip()}\n\n{marked}\n"


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


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
