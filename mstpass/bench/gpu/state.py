"""The state file: one line of JSON for each finished row, written as soon as it is finished.

The first line says what the rows belong to (card, torch, sizes). Rows of another card or another
torch are never added to it. Each call of the benchmark adds a line of kind ``run`` with its date,
driver, versions and clocks; a row names the number of its run.

What `mstpass bench gpu` measures, as plain data: settings, cases, rows and their outcomes.

A *part* of the benchmark has *cases*, and a case has *rows*. Each row runs in a process of its own,
in which it is timed in turn with the case's first row. The outcome of a row is a dict of plain data
with at least a ``status`` and a ``text``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstpass.bench.gpu.device import Device
from mstpass.errors import UserError

# the status of a row
MEASURED = "measured"
DRY = "dry"  # traced and planned, not run
FAILED = "failed"
SKIPPED = "skipped"  # what it needs is not installed
OUT_OF_MEMORY = "out of memory"
TOO_LONG = "took too long"
OUT_OF_TIME = "not run: out of time"  # a later call tries it again

Outcome = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all processes of one call know.

    Attributes:
        out: the folder of all results.
        quick: tiny sizes.
        dry: trace and plan, run nothing.
    """

    out: Path
    quick: bool = False
    dry: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that are compared with the first of them.

    Attributes:
        part: the name of its part.
        name: its name within the part, with its sizes.
        rows: the names of its rows; the most telling ones first, because time may run out.
        limit_s: the most seconds that one row may take.
    """

    part: str
    name: str
    rows: tuple[str, ...]
    limit_s: float

    def __post_init__(self) -> None:
        if not self.rows or len(set(self.rows)) != len(self.rows):
            raise ValueError(f"the rows of a case need different names: {self.rows}")


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be measured.

    Attributes:
        known: the outcomes of the case's other rows.
    """

    settings: Settings
    case: Case
    row: str
    device: Device
    known: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)


def outcome(status: str, text: str = "", **figures: Any) -> Outcome:
    """The outcome of a row."""
    return {"status": status, "text": text, **figures}


def is_final(outcome: Outcome | None) -> bool:
    """Whether a later call need not try the row again."""
    return outcome is not None and outcome["status"] != OUT_OF_TIME


# ---- the state file ------------------------------------------------------------------------------
FILE = "gpu.jsonl"
SCHEMA = "mstpass-gpu/1"


class OtherState(UserError):
    """The folder holds rows that do not belong to this run."""


class State:
    """The rows and runs of one folder.

    Attributes:
        header: what the rows belong to.
        runs: one dict for each call of the benchmark.
        rows: outcomes by part, case and row.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]):
        self.path = path
        self.header = dict(header)
        self.runs: list[dict[str, Any]] = []
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}

    @staticmethod
    def open(folder: Path, header: Mapping[str, Any]) -> State:
        """The state in a folder, which may be new.

        Raises:
            OtherState: the folder holds the rows of another card, torch or size.
        """
        state = State(folder / FILE, {"schema": SCHEMA, **header})
        if not state.path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            state.append(state.header)
            return state
        found = State.read(folder)
        differs = [key for key in state.header if found.header.get(key) != state.header[key]]
        if differs:
            there = ", ".join(f"{key}={found.header.get(key)}" for key in differs)
            here = ", ".join(f"{key}={state.header[key]}" for key in differs)
            raise OtherState(
                f"{state.path} holds rows with {there}, and this call has {here}: choose another "
                "folder with --out, or delete that file"
            )
        return found

    @staticmethod
    def read(folder: Path) -> State:
        """The state that is in a folder."""
        path = folder / FILE
        if not path.exists():
            raise OtherState(f"{path} does not exist: nothing has been measured in this folder")
        lines = _lines(path)
        if not lines or lines[0].get("schema") != SCHEMA:
            raise OtherState(f"{path} is not a state file of mstpass bench gpu")
        state = State(path, lines[0])
        for line in lines[1:]:
            state.take(line)
        return state

    # ---- writing -------------------------------------------------------------------------------
    def begin_run(self, facts: Mapping[str, Any]) -> None:
        self._add({"kind": "run", **facts})

    def add(self, case: Case, row: str, outcome: Outcome) -> None:
        place = {"part": case.part, "case": case.name, "row": row}
        self._add({"kind": "row", **place, "run": len(self.runs) - 1, **outcome})

    def _add(self, line: dict[str, Any]) -> None:
        self.append(line)
        self.take(line)

    def append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def take(self, line: Mapping[str, Any]) -> None:
        rest = {key: value for key, value in line.items() if key != "kind"}
        if line["kind"] == "run":
            self.runs.append(rest)
            return
        self.rows[line["part"], line["case"], line["row"]] = rest

    def to_data(self) -> dict[str, Any]:
        """All that is known, for the results."""
        return {"header": self.header, "runs": self.runs, "rows": list(self.rows.values())}

    # ---- reading -------------------------------------------------------------------------------
    def outcome(self, case: Case, row: str) -> dict[str, Any] | None:
        return self.rows.get((case.part, case.name, row))

    def missing(self, case: Case) -> list[str]:
        """The rows of a case that are not finished."""
        return [row for row in case.rows if not is_final(self.outcome(case, row))]

    def known(self, case: Case) -> dict[str, Outcome]:
        """The outcomes of a case's rows that have one."""
        found = ((row, self.outcome(case, row)) for row in case.rows)
        return {row: outcome for row, outcome in found if outcome is not None}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines; a last line that was not finished is cut off."""
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise OtherState(f"{path} is broken: {error}") from error
