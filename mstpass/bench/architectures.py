"""`mstpass bench architectures`: a training step of each of many Hugging Face architectures.

Inductor is compared with mst without options, and with mst at the least memory.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

import mstpass
from mstpass.bench import output, tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import (
    Comparison,
    Contender,
    Row,
    eager,
    error_text,
    inductor,
    mst,
    ratios,
    records,
)
from mstpass.bench.huggingface_architecture import TINY, Architecture, Scale
from mstpass.bench.huggingface_architectures import architectures
from mstpass.bench.models import Step
from mstpass.bench.tables import Result, Table
from mstpass.errors import UserError, require
from mstpass.report.report import Report

NAME = "architectures"
SCALE = Scale(
    vocabulary=8192,
    width=256,
    heads=4,
    mlp_width=768,
    expert_width=512,
    experts=8,
    layers=2,
    batch=2,
    length=1024,
    image_edge=128,
    images=2,
    longest_scan=64,
)
LEAST = "mst, memory_budget=0.0"
COLUMNS = (
    "architecture",
    "taken",
    "peak",
    "time",
    "taken for the least memory",
    "peak",
    "time",
    "refused",
    "run",
)
_DESCRIPTION = """\
Train a step of each of many Hugging Face architectures under Inductor, under mst
without options, and under mst at the least memory. Peaks and times are relative
to Inductor's. With --markdown, a row is written once it is known, and rows of
other architectures stay, so that a call with --model renews single rows."""
EXAMPLES = """  mstpass bench architectures --repeats 3 --markdown docs/architectures.md
  mstpass bench architectures --model t5 --model bart
"""


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench architectures")
    scale = TINY if arguments.quick else SCALE
    known = architectures(scale)
    unknown = [name for name in arguments.model if name not in known]
    if unknown:
        raise UserError(f"--model {unknown[0]!r} is unknown; choose from: {', '.join(known)}")
    names = [name for name in known if not arguments.model or name in arguments.model]
    result = Result(NAME, f"A step of Hugging Face's architectures: {scale}")
    rows = _rows_before(arguments.markdown, result.title, known)
    result.notes += _NOTES
    with Progress(NAME, 4 * len(names) * (2 + arguments.repeats)) as advance:
        for name in names:
            told = lambda what, name=name: advance(f"{name}: {what}")
            try:
                measured, reports = _measured(known[name], arguments, told)
            except Exception as error:  # a class that the installed transformers lacks, say
                rows[name] = _failed(name, error_text(error))
            else:
                rows[name] = _cells(name, measured, reports)
                result.records[name] = records(measured)
            ordered = tuple(rows[name] for name in known if name in rows)
            result.tables = [Table("steps", COLUMNS, ordered)]
            if arguments.markdown is not None:
                output.write_markdown(arguments.markdown, result, arguments)
    return result


def _measured(
    arch: Architecture, arguments: Arguments, advance: Callable[[str], None]
) -> tuple[dict[str, Row], list[Report]]:
    model = arch.build().to(arguments.device)
    batch = {name: value.to(arguments.device) for name, value in arch.batch().items()}
    before = len(mstpass.reports())
    comparison = Comparison(
        _loss_fn(arch, model, batch),
        lambda fn: Step(fn, list(model.parameters())),
        arguments.device,
        advance,
    )
    comparison.add(_contenders())
    comparison.time(arguments.repeats)
    comparison.measure_peaks()
    return comparison.rows, mstpass.reports()[before:]


def _contenders() -> list[Contender]:
    return [eager(), inductor(), mst(), mst(LEAST, memory_budget=0.0)]


def _loss_fn(
    arch: Architecture, model: nn.Module, batch: dict[str, Tensor]
) -> Callable[[], Tensor]:
    loss = arch.loss_of(model)
    return lambda: loss(**batch)


def _cells(name: str, rows: dict[str, Row], reports: list[Report]) -> tuple[str, ...]:
    _, base, free, least = rows.values()
    errors = [f"{row.name}: {row.error}" for row in rows.values() if row.error]
    if errors or len(reports) != 2:
        return _failed(name, errors[0] if errors else f"{len(reports)} graphs instead of one each")
    cells: list[str] = [name]
    for row, report in zip((free, least), reports, strict=True):
        cells += [
            _taken(report),
            tables.times_cell(tables.quotient(row.peak_bytes, base.peak_bytes)),
            _time_cell(row, base),
        ]
    return (*cells, _refused(reports[1]), _today())


def _failed(name: str, error: str) -> tuple[str, ...]:
    return (name, error, *["-"] * (len(COLUMNS) - 3), _today())


def _today() -> str:
    return datetime.date.today().isoformat()


def _time_cell(row: Row, base: Row) -> str:
    ratio = ratios(row, base)
    return tables.times_cell(ratio and ratio[0])


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
main = Command(NAME, (run,), _DESCRIPTION, EXAMPLES, extra=("model",))
