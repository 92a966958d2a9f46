"""Tables of the benchmark's rows, from the data of its JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mstpass.bench import tables
from mstpass.bench.comparison import INDUCTOR
from mstpass.bench.gpu import chunks, cuda_tests, longest
from mstpass.bench.gpu.rows import DRY, MEASURED, Outcome
from mstpass.bench.tables import Table
from mstpass.gpus import gpu_like

GIB = 2**30
_NONE = "-"
_COSTS = (  # what is shown of them: name, text, scale
    ("chunk_us", "us that a chunk adds to a loop", 1.0),
    ("flops_per_us", "TFLOP/s of whole products, bfloat16", 1e-6),
    ("copied_bytes_per_us", "GB/s of a copy", 1e-3),
)

Data = Mapping[str, Any]
Rows = Sequence[Outcome]


def all_tables(data: Data) -> dict[str, list[Table]]:
    """The tables of each part that there are rows of, by the part's name."""
    found: dict[str, list[Table]] = {}
    for (part, case), rows in _by_case(data).items():
        found.setdefault(part, []).append(_table(part, case, rows, data["header"]))
    return found


def _by_case(data: Data) -> dict[tuple[str, str], list[Outcome]]:
    cases: dict[tuple[str, str], list[Outcome]] = {}
    for row in data["rows"]:
        cases.setdefault((row["part"], row["case"]), []).append(row)
    return cases


def _table(part: str, case: str, rows: Rows, header: Data) -> Table:
    if part == cuda_tests.NAME:
        return tests_table(case, rows)
    if part == longest.NAME:
        return longest_table(case, rows)
    if (part, case) == (chunks.NAME, chunks.CALIBRATION):
        return costs_table(case, rows)
    return steps_table(case, rows, header)


# ---- one table each ----------------------------------------------------------------------------
def steps_table(case: str, rows: Rows, header: Data) -> Table:
    """Steps that were timed in turn with Inductor's."""
    base = next((row for row in rows if row["row"] == INDUCTOR), {})
    lines = tuple(
        (
            row["row"],
            _measured(row, milliseconds),
            tables.ratio_cell(_triple(row)) if _is_measured(row) else _NONE,
            _estimate(row),
            tflops(row) if _is_measured(row) else _NONE,
            share_of_limit(row, header) if _is_measured(row) else _NONE,
            gib(row.get("peak_bytes")) if _is_measured(row) else _NONE,
            tables.times_cell(tables.quotient(row.get("peak_bytes"), base.get("peak_bytes"))),
            gib(row.get("simulated_bytes")),
            tables.seconds_cell(row.get("first_call_s")),
            _NONE if row.get("gradient_error") is None else f"{row['gradient_error']:.1e}",
        )
        for row in rows
    )
    columns = (
        "", "time ms", "time / Inductor", "estimated", "TFLOP/s", "of the limit", "peak GiB",
        "peak / Inductor", "simulated GiB", "first call s", "gradient error",
    )  # fmt: skip
    return Table(case, columns, lines)


def costs_table(case: str, rows: Rows) -> Table:
    """What chunks cost: measured, and as it was assumed before."""
    (row,) = rows
    costs, assumed = row.get("costs") or {}, row.get("assumed") or {}
    before, now = dict(assumed.get("slowdown", ())), dict(costs.get("slowdown", ()))
    lines = [
        (
            f"{n} rows a chunk, time / whole",
            tables.times_cell(now.get(n)),
            tables.times_cell(before.get(n)),
        )
        for n in sorted({*before, *now})
    ]
    for name, text, scale in _COSTS:
        new, old = (_scaled(found.get(name), scale) for found in (costs, assumed))
        lines.append((text, new, old))
    if not _is_measured(row):
        lines.insert(0, (row["row"], outcome_text(row), _NONE))
    return Table(case, ("", "measured", "assumed before"), tuple(lines))


def tests_table(case: str, rows: Rows) -> Table:
    lines = tuple(
        (
            row["row"],
            *(str(row.get(key, _NONE)) for key in ("passed", "failed", "skipped", "seconds")),
            row["text"] or (row["status"] if not _is_measured(row) else ""),
        )
        for row in rows
    )
    return Table(case, ("file", "passed", "failed", "skipped", "seconds", ""), lines)


def longest_table(case: str, rows: Rows) -> Table:
    """The longest sequences, and beside them what was predicted."""
    predicted = next((r.get("lengths") or {} for r in rows if r["row"] == longest.PREDICTION), {})
    lines = []
    for row in rows:
        if row["row"] == longest.PREDICTION:
            if row["status"] not in (MEASURED, DRY):
                lines.append((row["row"], outcome_text(row), *[_NONE] * 4))
            continue
        length, planned = row.get("length"), predicted.get(row["row"])
        lines.append(
            (
                row["row"],
                _measured(row, lambda row: tokens(row["length"])),
                tokens(planned),
                tables.times_cell(tables.quotient(length, planned)) if _is_measured(row) else _NONE,
                gib(row.get("peak_bytes")),
                tables.seconds_cell(row.get("median_s")),
            )
        )
    columns = (
        "", "tokens", "predicted tokens", "measured / predicted", "peak GiB", "step s",
    )  # fmt: skip
    return Table(f"longest sequence within {case}", columns, tuple(lines))


# ---- cells -------------------------------------------------------------------------------------
def outcome_text(outcome: Outcome) -> str:
    """An outcome on one line, without the row's name."""
    if outcome["status"] not in (MEASURED, DRY):
        return outcome["status"] + (f": {outcome['text']}" if outcome["text"] else "")
    words = ["dry"] if outcome["status"] == DRY else []
    if "passed" in outcome:
        words.append(f"{outcome['passed']} passed in {outcome['seconds']:.0f} s")
    if outcome.get("length"):
        words.append(f"{tokens(outcome['length'])} tokens")
    if outcome["status"] == MEASURED and outcome.get("median_s") is not None:
        words += [f"{milliseconds(outcome)} ms"]
    if outcome["status"] == MEASURED and outcome.get("peak_bytes") is not None:
        words += [f"peak {gib(outcome['peak_bytes'])} GiB"]
    if outcome["status"] == MEASURED and outcome.get("ratio"):
        words.append(f"{outcome['ratio'][0]:.2f}x Inductor's time")
    if outcome.get("simulated_bytes"):
        words.append(f"simulated {gib(outcome['simulated_bytes'])} GiB")
    for name, length in (outcome.get("lengths") or {}).items():
        words.append(f"{name} {tokens(length)}")
    return ", ".join(words) or outcome["text"] or outcome["status"]


def milliseconds(outcome: Outcome) -> str:
    value = 1e3 * outcome["median_s"]
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def tflops(outcome: Outcome) -> str:
    rate = outcome.get("flops_per_s")
    return _NONE if rate is None else f"{rate / 1e12:.0f}"


def share_of_limit(outcome: Outcome, header: Data) -> str:
    """The rate of a step as a share of the card's, by its data sheet."""
    rate, limit = outcome.get("flops_per_s"), limit_flops_per_s(header)
    return _NONE if rate is None or limit is None else f"{100 * rate / limit:.0f} %"


def limit_flops_per_s(header: Data) -> float | None:
    """Dense bfloat16 operations a second of the card; None where its kind is not known."""
    capability = header.get("capability")
    kind = gpu_like(header["card"], (capability[0], capability[1])) if capability else None
    if kind is None:
        return None
    kind = kind.with_multiprocessors(header["multiprocessors"])
    return 1e6 * kind.flops_per_us.get(torch.bfloat16, math.nan)


def gib(size: int | None) -> str:
    return _NONE if size is None else f"{size / GIB:.2f}"


def tokens(count: int | None) -> str:
    return _NONE if count is None else f"{count:,}"


def _scaled(value: float | None, scale: float) -> str:
    return _NONE if value is None else f"{value * scale:,.1f}"


def _estimate(row: Outcome) -> str:
    """The time relative to Inductor's by the cost model, and how far it is from the measured."""
    estimated, ratio = row.get("estimated"), row.get("ratio")
    text = tables.times_cell(estimated)
    if estimated is None or ratio is None or not _is_measured(row):
        return text
    return f"{text} ({100 * (estimated / ratio[0] - 1):+.0f} %)"


def _is_measured(row: Outcome) -> bool:
    return bool(row["status"] == MEASURED)


def _measured(row: Outcome, cell: Any) -> str:
    """A cell of a measured row; what happened instead in any other."""
    if _is_measured(row):
        return str(cell(row))
    return "dry" if row["status"] == DRY else outcome_text(row)


def _triple(row: Outcome) -> tuple[float, float, float] | None:
    ratio = row.get("ratio")
    return None if ratio is None else (ratio[0], ratio[1], ratio[2])
