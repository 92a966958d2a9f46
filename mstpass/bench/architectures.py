"""Train a step of each of many Hugging Face architectures under Inductor, under mst
without options, and under mst at the least memory. Peaks and times are relative
to Inductor's. With --markdown, a row is written once it is known, and rows of
other architectures stay, so that a call with --model renews single rows.

Inductor is compared with mst without options, and with mst at the least memory.

examples:
  mstpass bench architectures --repeats 3 --markdown docs/architectures.md
  mstpass bench architectures --model t5 --model bart
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mstpass
from mstpass.bench import comparison, results
from mstpass.bench.comparison import Contender, eager, error_text, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.huggingface import TINY, Architecture, Scale, architectures
from mstpass.bench.models import Work
from mstpass.bench.results import Result, Row, Table, times_cell
from mstpass.errors import require
from mstpass.report.report import Report

NAME = "architectures"
SCALE = Scale(
    vocabulary=8192,
    width=256,
    mlp_width=768,
    expert_width=512,
    experts=8,
    length=1024,
    image_edge=128,
    images=2,
    longest_scan=64,
)
LEAST = "mst, memory_budget=0.0"
COLUMNS = (
    *("architecture", "taken", "peak", "time"),
    *("taken for the least memory", "peak", "time", "refused", "run"),
)


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench architectures")
    scale = TINY if arguments.quick else SCALE
    known = architectures(scale)
    names = arguments.models(known, ", ")
    result = Result(NAME, f"A step of Hugging Face's architectures: {scale}")
    rows = _rows_before(arguments.markdown, result.title, known)
    result.notes += _NOTES
    with advancing(NAME, 4 * len(names) * (2 + arguments.repeats)) as advance:
        for name in names:
            try:
                measured, reports = _measured(name, known[name], arguments, advance)
            except Exception as error:  # a class that the installed transformers lacks, say
                rows[name] = _failed(name, error_text(error))
            else:
                rows[name] = _cells(name, measured, reports)
                result.records[name] = results.records(measured)
            ordered = tuple(rows[name] for name in known if name in rows)
            result.tables = [Table("steps", COLUMNS, ordered)]
            if arguments.markdown is not None:
                results.write_markdown(arguments.markdown, result, arguments.device)
    return result


def _measured(
    name: str, arch: Architecture, arguments: Arguments, advance: Callable[[str], None]
) -> tuple[dict[str, Row], list[Report]]:
    model = arch.build().to(arguments.device)
    batch = {key: value.to(arguments.device) for key, value in arch.batch().items()}
    loss = arch.loss_of(model)
    before = len(mstpass.reports())
    work = Work.of(model, lambda: loss(**batch))
    named = lambda what: advance(f"{name}: {what}")
    rows = comparison.compare(_contenders(), work, arguments, named)
    return rows, mstpass.reports()[before:]


def _contenders() -> list[Contender]:
    return [eager(), inductor(), mst(), mst(LEAST, memory_budget=0.0)]


def _cells(name: str, rows: dict[str, Row], reports: list[Report]) -> tuple[str, ...]:
    _, base, free, least = rows.values()
    errors = [f"{row.name}: {row.error}" for row in rows.values() if row.error]
    if errors or len(reports) != 2:
        return _failed(name, errors[0] if errors else f"{len(reports)} graphs instead of one each")
    cells: list[str] = [name]
    for row, report in zip((free, least), reports, strict=True):
        relative = results.peak_ratio(row, base), results.time_ratio(row, base)
        cells += [_taken(report), *map(times_cell, relative)]
    return (*cells, _refused(reports[1]), results.today())


def _failed(name: str, error: str) -> tuple[str, ...]:
    return (name, error, *["-"] * (len(COLUMNS) - 3), results.today())


def _taken(report: Report) -> str:
    counts = Counter(f"{region.kind} {region.mode}" for region in report.regions)
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "nothing"


def _refused(report: Report) -> str:
    reasons = Counter(_without_numbers(r.reason) for r in report.rejections)
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.items()) or "-"


def _without_numbers(reason: str) -> str:
    """Numbers of nodes say nothing outside of their graph."""
    return re.sub(r"_\d+\b", "", reason)


def _rows_before(
    path: Path | None, title: str, known: dict[str, Architecture]
) -> dict[str, tuple[str, ...]]:
    """The rows that an earlier call with the same sizes has written into the file."""
    text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    if title not in text:
        return {}
    rows = {}
    for line in text.splitlines():
        columns = line.strip("|").split(" | ")
        cells = tuple(cell.strip().replace("\\|", "|") for cell in columns)
        if line.startswith("| ") and cells[0] in known and len(cells) == len(COLUMNS):
            rows[cells[0]] = cells
    return rows


_NOTES = (
    "Peak and time: of forward and backward, relative to Inductor's (time: the median of rounds in "
    "turn). Loss and gradients are compared with eager mode's, to within 1e-5 and 1e-4.",
    "Refused: by the plan of the least memory, for each reason how often.",
)
main = Benchmark(NAME, (run,), __doc__, options=("model",))
