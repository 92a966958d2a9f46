"""Writes the results, a Markdown page and the README's table, from the rows of the state file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mstpass.bench import results
from mstpass.bench.comparison import INDUCTOR, MST
from mstpass.bench.gpu import heads
from mstpass.bench.gpu.runner import PARTS
from mstpass.bench.gpu.state import DRY, FILE, MEASURED, OUT_OF_TIME, Outcome, State
from mstpass.bench.processes import ROOT
from mstpass.bench.results import (
    NONE,
    Ratio,
    Table,
    quotient,
    ratio_cell,
    table_lines,
    text_of,
    times_cell,
    with_section,
)
from mstpass.gpus import gpu_like

GIB = 2**30
_COSTS = (  # what is shown of them: name, text, scale
    ("chunk_us", "us that a chunk adds to a loop", 1.0),
    ("flops_per_us", "TFLOP/s of whole products, bfloat16", 1e-6),
    ("copied_bytes_per_us", "GB/s of a copy", 1e-3),
)

Data = Mapping[str, Any]
Rows = Sequence[Outcome]
Columns = dict[str, Callable[[Outcome], str]]


def all_tables(data: Data) -> dict[str, list[Table]]:
    """The tables of each part that there are rows of, by the part's name."""
    cases: dict[tuple[str, str], list[Outcome]] = {}
    for row in data["rows"]:
        cases.setdefault((row["part"], row["case"]), []).append(row)
    found: dict[str, list[Table]] = {}
    for (part, case), rows in cases.items():
        found.setdefault(part, []).append(_table(part, case, rows, data["header"]))
    return found


def _table(part: str, case: str, rows: Rows, header: Data) -> Table:
    if (part, case) == (heads.LOOPS, heads.CALIBRATION):
        return costs_table(case, rows)
    return steps_table(case, rows, header)


# ---- one table each ----------------------------------------------------------------------------
def steps_table(case: str, rows: Rows, header: Data) -> Table:
    """Steps that were timed in turn with Inductor's."""
    base = next((row for row in rows if row["row"] == INDUCTOR), {})
    columns: Columns = {
        "": lambda row: row["row"],
        "time ms": lambda row: _or_outcome(row, milliseconds),
        "time / Inductor": _if_measured(lambda row: ratio_cell(_triple(row))),
        "estimated": _estimate,
        "TFLOP/s": _if_measured(tflops),
        "of the limit": _if_measured(lambda row: share_of_limit(row, header)),
        "peak GiB": _if_measured(lambda row: gib(row.get("peak_bytes"))),
        "peak / Inductor": lambda row: times_cell(
            quotient(row.get("peak_bytes"), base.get("peak_bytes"))
        ),
        "simulated GiB": lambda row: gib(row.get("simulated_bytes")),
        "first call s": lambda row: results.seconds_cell(row.get("first_call_s")),
        "gradient error": lambda row: text_of(row.get("gradient_error"), "{:.1e}".format),
    }
    return Table.of(case, rows, columns)


def costs_table(case: str, rows: Rows) -> Table:
    """What chunks cost: measured, and as it was assumed before."""
    (row,) = rows
    costs, assumed = row.get("costs") or {}, row.get("assumed") or {}
    before, now = dict(assumed.get("slowdown", ())), dict(costs.get("slowdown", ()))
    lines: list[tuple[str, ...]] = []
    if not _is_measured(row):
        lines.append((row["row"], outcome_text(row), NONE))
    for n in sorted({*before, *now}):
        times = times_cell(now.get(n)), times_cell(before.get(n))
        lines.append((f"{n} rows a chunk, time / whole", *times))
    for name, text, scale in _COSTS:
        in_unit = lambda value, scale=scale: f"{value * scale:,.1f}"
        lines.append((text, *(text_of(found.get(name), in_unit) for found in (costs, assumed))))
    return Table(case, ("", "measured", "assumed before"), tuple(lines))


# ---- cells -------------------------------------------------------------------------------------
def outcome_text(outcome: Outcome) -> str:
    """An outcome on one line, without the row's name."""
    status = outcome["status"]
    if status not in (MEASURED, DRY):
        return status + (f": {outcome['text']}" if outcome["text"] else "")
    words = ["dry"] if status == DRY else []
    if status == MEASURED:
        if outcome.get("median_s") is not None:
            words.append(f"{milliseconds(outcome)} ms")
        if outcome.get("peak_bytes") is not None:
            words.append(f"peak {gib(outcome['peak_bytes'])} GiB")
        if outcome.get("ratio"):
            words.append(f"{outcome['ratio'][0]:.2f}x Inductor's time")
    if outcome.get("simulated_bytes"):
        words.append(f"simulated {gib(outcome['simulated_bytes'])} GiB")
    return ", ".join(words) or outcome["text"] or status


def milliseconds(outcome: Outcome) -> str:
    value = 1e3 * outcome["median_s"]
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def tflops(outcome: Outcome) -> str:
    return text_of(outcome.get("flops_per_s"), lambda rate: f"{rate / 1e12:.0f}")


def share_of_limit(outcome: Outcome, header: Data) -> str:
    """The rate of a step as a share of the card's, by its data sheet."""
    share = quotient(outcome.get("flops_per_s"), limit_flops_per_s(header))
    return text_of(share, lambda share: f"{100 * share:.0f} %")


def limit_flops_per_s(header: Data) -> float | None:
    """Dense bfloat16 operations a second of the card; None where its kind is not known."""
    capability = header.get("capability")
    kind = gpu_like(header["card"], (capability[0], capability[1])) if capability else None
    if kind is None:
        return None
    kind = kind.with_multiprocessors(header["multiprocessors"])
    return 1e6 * kind.flops_per_us.get(torch.bfloat16, math.nan)


def gib(size: int | None) -> str:
    return text_of(size, lambda size: f"{size / GIB:.2f}")


def _estimate(row: Outcome) -> str:
    """The time relative to Inductor's by the cost model, and how far it is from the measured."""
    estimated, ratio = row.get("estimated"), row.get("ratio")
    text = times_cell(estimated)
    if estimated is None or ratio is None or not _is_measured(row):
        return text
    return f"{text} ({100 * (estimated / ratio[0] - 1):+.0f} %)"


def _is_measured(row: Outcome) -> bool:
    return bool(row["status"] == MEASURED)


def _if_measured(cell: Callable[[Outcome], str]) -> Callable[[Outcome], str]:
    """Cells of measured rows; empty in the others."""
    return lambda row: cell(row) if _is_measured(row) else NONE


def _or_outcome(row: Outcome, cell: Callable[[Outcome], str]) -> str:
    """A cell of a measured row; what happened instead in any other."""
    if _is_measured(row):
        return cell(row)
    return "dry" if row["status"] == DRY else outcome_text(row)


def _triple(row: Outcome) -> Ratio | None:
    ratio = row.get("ratio")
    return None if ratio is None else (ratio[0], ratio[1], ratio[2])


# ---- the files -----------------------------------------------------------------------------------
PAGE_FILE, MARK = "gpu.md", "gpu"
README = ROOT / "README.md"
_NOTHING = "Nothing has been measured on a GPU yet."
_DRY = "**A dry run: nothing here is measured.** Steps were traced and planned without a GPU."
_HEADING = "# On a GPU\n"
_TITLES = {
    "loops": "Loops",
    "heads": f"LM heads: d={heads.WIDTH}, V={heads.VOCABULARY}, bf16, forward and backward",
    "blocks": "Llama-3-8B-shaped blocks with head and loss, forward and backward",
}


def write(state: State, folder: Path, published: bool) -> list[Path]:
    """Write the tables of a folder's rows; if they are published, into the README as well."""
    data, page = state.to_data(), folder / PAGE_FILE
    old = page.read_text(encoding="utf-8") if page.exists() else _HEADING
    page.write_text(with_section(old, MARK, section(data)), encoding="utf-8")
    if published:
        write_readme(README, data)
    return [page, README] if published else [page]


def left_over(state: State) -> int:
    """The number of rows that were not run for lack of time."""
    return sum(outcome["status"] == OUT_OF_TIME for outcome in state.rows.values())


def published_data() -> Data | None:
    """The results in the documentation of this checkout; None where there are none."""
    folder = README.parent / "docs" / "results"
    return State.read(folder).to_data() if (folder / FILE).exists() else None


# ---- the page ----------------------------------------------------------------------------------
def section(data: Data | None) -> str:
    """All tables as Markdown, with the machine that they were measured on."""
    if data is None:
        return f"{_NOTHING}\n"
    lines = [*([_DRY, ""] if data["header"]["dry"] else []), *machine_lines(data)]
    for name, found in all_tables(data).items():
        what = f"`mstpass bench gpu --part {name}`: {PARTS[name].what}."
        lines += ["", f"## {_TITLES[name]}", "", what]
        for table in found:
            lines += ["", f"{table.title}:", "", *table_lines(table)]
        lines += plan_lines(data, name)
    return "\n".join(lines) + "\n"


def machine_lines(data: Data) -> list[str]:
    """The card and, for each call of the benchmark, its date, versions and clocks."""
    header, limit = data["header"], limit_flops_per_s(data["header"])
    sizes = "tiny sizes (`--quick`), " if header["quick"] else ""
    memory = f", {gib(header['memory_bytes'])} GiB" if "memory_bytes" in header else ""
    rate = f", at most {limit / 1e12:.0f} TFLOP/s in dense bfloat16" if limit else ""
    keys = ("date", "driver", "cuda", "triton", "mstpass", "transformers", "python", "clocks")
    columns = (*keys[:-1], "clocks as found")
    runs = tuple(tuple(run[key] or "-" for key in keys) for run in data["runs"])
    return [
        f"**{header['card']}**{memory}{rate}; {sizes}torch {header['torch']}.",
        "",
        *table_lines(Table("", columns, runs)),
    ]


def plan_lines(data: Data, part: str) -> list[str]:
    """What mst ran in chunks, a line for each row that says so."""
    found = [
        f"- {row['case']}, {row['row']}: {row['plan']}."
        for row in data["rows"]
        if row["part"] == part and row.get("plan")
    ]
    return ["", *found] if found else []


# ---- the README's table ------------------------------------------------------------------------
def write_readme(path: Path, data: Data | None) -> None:
    """Rewrite the section of a README between the marks of this benchmark."""
    old = path.read_text(encoding="utf-8")
    path.write_text(with_section(old, MARK, readme_section(data)), encoding="utf-8")


def readme_section(data: Data | None) -> str:
    """The README's words on GPUs, with the table of a head if it is measured."""
    if data is None or data["header"]["dry"] or data["header"]["quick"]:
        return (
            f"{_NOTHING} [`mstpass bench gpu`](docs/results/gpu.md) measures everything on one in\n"
            "ten minutes, without network, and writes its table here.\n"
        )
    header, last = data["header"], data["runs"][-1]
    made = (
        f"{last['date'][:10]}, {header['card']}, driver {last['driver']}, torch {header['torch']}. "
        "[All rows](docs/results/gpu.md)."
    )
    return "\n".join([*_head_lines(data), made, ""])


def _head_lines(data: Data) -> list[str]:
    """The measured rows of the first case of a head."""
    rows = [r for r in data["rows"] if r["part"] == heads.NAME and r["status"] == MEASURED]
    if not rows:
        return []
    case = rows[0]["case"]
    columns: Columns = {
        "": _name,
        "peak GiB": lambda row: gib(row["peak_bytes"]),
        "time ms": milliseconds,
        "TFLOP/s": tflops,
        "of the limit": lambda row: share_of_limit(row, data["header"]),
        "time / Inductor": lambda row: ratio_cell(row["ratio"]),
    }
    size = f"{case}, d={heads.WIDTH}, V={heads.VOCABULARY}, bf16"
    title = f"A Llama-3 head on a GPU ({size}), forward and backward:"
    table = Table.of("", (row for row in rows if row["case"] == case), columns)
    return [title, "", *table_lines(table), ""]


def _name(row: Outcome) -> str:
    return f"**{row['row']}**" if row["row"].startswith(MST) else str(row["row"])
