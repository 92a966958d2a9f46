"""Writes the results: JSON, a Markdown page, and the README's table, all from the same data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstpass.bench.comparison import MST
from mstpass.bench.gpu import heads, llama, longest, tables
from mstpass.bench.gpu.parts import PARTS
from mstpass.bench.gpu.rows import MEASURED, OUT_OF_TIME, Outcome
from mstpass.bench.gpu.state import SCHEMA, State
from mstpass.bench.gpu.tables import Columns, Data, gib, limit_flops_per_s, tokens
from mstpass.bench.processes import ROOT
from mstpass.bench.results import Table, ratio_cell, table_lines, with_section

JSON_FILE, PAGE_FILE, MARK = "gpu.json", "gpu.md", "gpu"
README = ROOT / "README.md"
_NOTHING = "Nothing has been measured on a GPU yet."
_DRY = "**A dry run: nothing here is measured.** Steps were traced and planned without a GPU."
_HEADING = "# On a GPU\n"
_TITLES = {
    "tests": "CUDA tests",
    "loops": "Loops",
    "heads": f"LM heads: d={heads.WIDTH}, V={heads.VOCABULARY}, bf16, forward and backward",
    "blocks": "Llama-3-8B-shaped blocks with head and loss, forward and backward",
    "longest": "The longest sequence that fits",
}


def write(state: State, folder: Path, published: bool) -> list[Path]:
    """Write all results into a folder; if they are published, into the README as well."""
    data = {"schema": SCHEMA, **state.to_data()}
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / JSON_FILE, folder / PAGE_FILE]
    files[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    old = files[1].read_text(encoding="utf-8") if files[1].exists() else _HEADING
    files[1].write_text(with_section(old, MARK, section(data)), encoding="utf-8")
    if published:
        write_readme(README, data)
        files.append(README)
    return files


def left_over(state: State) -> int:
    """The number of rows that were not run for lack of time."""
    return sum(outcome["status"] == OUT_OF_TIME for outcome in state.rows.values())


def published_data() -> Data | None:
    """The results in the documentation of this checkout; None where there are none."""
    path = README.parent / "docs" / "results" / JSON_FILE
    if not path.exists():
        return None
    data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


# ---- the page ----------------------------------------------------------------------------------
def section(data: Data | None) -> str:
    """All tables as Markdown, with the machine that they were measured on."""
    if data is None:
        return f"{_NOTHING}\n"
    lines = [*([_DRY, ""] if data["header"]["dry"] else []), *machine_lines(data)]
    for name, found in tables.all_tables(data).items():
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
    """The README's words on GPUs: tables of a head and of the longest sequences, if there are."""
    if data is None or data["header"]["dry"] or data["header"]["quick"]:
        return (
            f"{_NOTHING} [`mstpass bench gpu`](docs/results/gpu.md) measures everything on one in\n"
            "ten minutes, without network, and writes its table here.\n"
        )
    parts = [_head_lines(data), _longest_lines(data)]
    header, last = data["header"], data["runs"][-1]
    made = (
        f"{last['date'][:10]}, {header['card']}, driver {last['driver']}, torch {header['torch']}. "
        "[All rows](docs/results/gpu.md)."
    )
    return "\n".join([line for part in parts if part for line in [*part, ""]] + [made, ""])


def _rows(data: Data, part: str) -> list[Outcome]:
    """The measured rows of the first case of a part."""
    rows = [row for row in data["rows"] if row["part"] == part and row["status"] == MEASURED]
    return [row for row in rows if row["case"] == rows[0]["case"]]


def _head_lines(data: Data) -> list[str]:
    rows = _rows(data, heads.NAME)
    if not rows:
        return []
    columns: Columns = {
        "": _name,
        "peak GiB": lambda row: gib(row["peak_bytes"]),
        "time ms": tables.milliseconds,
        "TFLOP/s": tables.tflops,
        "of the limit": lambda row: tables.share_of_limit(row, data["header"]),
        "time / Inductor": lambda row: ratio_cell(row["ratio"]),
    }
    size = f"{rows[0]['case']}, d={heads.WIDTH}, V={heads.VOCABULARY}, bf16"
    title = f"A Llama-3 head on a GPU ({size}), forward and backward:"
    return [title, "", *table_lines(Table.of("", rows, columns))]


def _longest_lines(data: Data) -> list[str]:
    rows = [row for row in _rows(data, longest.NAME) if row["row"] != longest.PREDICTION]
    if not rows:
        return []
    columns: Columns = {
        "": _name,
        "tokens": lambda row: tokens(row["length"]),
        "predicted by `mstpass plan`": lambda row: tokens(row["predicted"]),
    }
    model = f"a Llama-3-8B-shaped model with {llama.FULL.layers} layers"
    title = f"The longest sequence of {model} within {rows[0]['case']}:"
    return [title, "", *table_lines(Table.of("", rows, columns))]


def _name(row: Outcome) -> str:
    return f"**{row['row']}**" if row["row"].startswith(MST) else str(row["row"])
