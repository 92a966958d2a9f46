"""Measure mst and others on this machine's CUDA device: loops and what their
chunks cost, LM heads at Llama-3 sizes, and Llama-3-8B-shaped blocks under
memory budgets. No network is needed. Each finished row is kept at once; a
second call goes on with what is missing.

examples:
  mstpass bench gpu                         ten minutes; call it again to go on
  mstpass bench gpu --part heads --part blocks
  mstpass bench gpu --out /tmp/gpu --minutes 60
  mstpass bench gpu --dry-run --quick       on any machine, without a GPU
  mstpass bench gpu --tables                write the tables again, measure nothing

exit codes: 0 all rows are finished, whatever they say; 1 failed; 2 wrong
arguments, or this machine cannot run it; 3 the time is over and rows are left
for another call; 130 interrupted, with all finished rows kept
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mstpass.argument_parsers import command_parser
from mstpass.bench.gpu import device, heads, results
from mstpass.bench.gpu.results import outcome_text
from mstpass.bench.gpu.runner import PARTS, Call, Runner, in_process
from mstpass.bench.gpu.state import OUT_OF_TIME, Case, Outcome, Settings, State
from mstpass.bench.harness import advancing
from mstpass.bench.processes import ROOT

RESULTS = ROOT / "docs" / "results"
_OUT = Path("gpu-out")
_MINUTES, _DRY_MINUTES = 10.0, 60.0


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    Attributes:
        settings: what the processes know as well.
        parts: the names of the parts to run.
        seconds: the time that the call may take.
        tables: write the tables of rows that are there, and measure nothing.
    """

    settings: Settings
    parts: tuple[str, ...]
    seconds: float
    tables: bool

    @property
    def is_published(self) -> bool:
        """Whether the results are those that this checkout's documentation shows."""
        full = not (self.settings.quick or self.settings.dry)
        return full and self.settings.out.resolve() == RESULTS.resolve()


def parse(argv: Sequence[str]) -> Arguments:
    parser = command_parser("mstpass bench gpu", __doc__)
    add = parser.add_argument
    parts = "; ".join(f"{part.name}: {part.what}" for part in PARTS.values())
    part = f"only this part; may be repeated. {parts}"
    out = (
        "folder of the results, in which a second call goes on (default: docs/results of the "
        f"checkout; {_OUT} without one, with --quick and with --dry-run)"
    )
    most = (
        f"the most that this call may take (default {_MINUTES:g}; with --dry-run {_DRY_MINUTES:g})"
    )
    dry = "trace and plan every row without a GPU; nothing is measured"
    add("--part", action="append", choices=tuple(PARTS), metavar="NAME", help=part)
    add("--out", type=Path, metavar="DIR", help=out)
    add("--minutes", type=_minutes, help=most)
    add("--quick", action="store_true", help="tiny sizes, to see that it runs")
    add("--dry-run", action="store_true", help=dry)
    add("--tables", action="store_true", help="write the tables of the rows in DIR again")
    given = parser.parse_args(argv)
    published = RESULTS.is_dir() and not (given.quick or given.dry_run)
    out_folder = given.out or (RESULTS if published else _OUT)
    settings = Settings(out_folder, quick=given.quick, dry=given.dry_run)
    names = tuple(name for name in PARTS if name in (given.part or PARTS))
    minutes = given.minutes or (_DRY_MINUTES if given.dry_run else _MINUTES)
    return Arguments(settings, names, 60 * minutes, given.tables)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value


# ---- the command ---------------------------------------------------------------------------------
DONE, BAD_INPUT, ROWS_LEFT, INTERRUPTED = 0, 2, 3, 130


def main(argv: Sequence[str] = (), call: Call = in_process) -> int:
    """Run `mstpass bench gpu`.

    Args:
        call: measures in a new process.
    """
    given = parse(argv)
    if given.tables:
        _write(given, State.read(given.settings.out))
        return DONE
    if not given.settings.dry:
        try:
            device.check_machine(", ".join(PARTS[name].what for name in given.parts))
        except device.CannotRun as error:
            print(f"mstpass bench gpu: {error}", file=sys.stderr)
            return BAD_INPUT
    sizes = {"quick": given.settings.quick, "dry": given.settings.dry}
    state = State.open(given.settings.out, {**device.card(), **sizes})
    state.begin_run(device.facts())
    interrupted = False
    try:
        with _ended_like_interrupted():
            _measure(given, state, call)
    except KeyboardInterrupt:
        interrupted = True
        print("\nmstpass bench gpu: interrupted; finished rows are kept", file=sys.stderr)
    _write(given, state)
    if interrupted:
        return INTERRUPTED
    return ROWS_LEFT if results.left_over(state) else DONE


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """In here a SIGTERM, as of ``timeout``, ends the process and keeps all rows, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(given: Arguments, state: State, call: Call) -> None:
    parts = [PARTS[name] for name in given.parts]
    cases = [case for part in parts for case in part.cases(given.settings)]
    left = sum(len(state.missing(case)) for case in cases)
    path = heads.costs_path(given.settings.out)
    start, has_bar = time.monotonic(), find_spec("rich") is not None
    with advancing("gpu", left) if has_bar else nullcontext(lambda what: None) as advance:

        def show(case: Case, row: str, outcome: Outcome) -> None:
            """A line for each row, above the progress bar of a terminal."""
            if outcome["status"] != OUT_OF_TIME:
                said = f"{case.part}, {case.name}, {row}: {outcome_text(outcome)}"
                print(f"{time.monotonic() - start:5.0f} s  {said}", flush=True)
            advance(f"{case.part}, {row}")

        variables = {heads.COSTS_VARIABLE: str(path)}
        runner = Runner(given.settings, state, call, show, environment=variables)
        runner.run(parts, given.seconds)


def _write(given: Arguments, state: State) -> None:
    for path in results.write(state, given.settings.out, published=given.is_published):
        print(f"written: {path}")
    left = results.left_over(state)
    if left:
        print(f"{left} rows were not run for lack of time: the same command goes on with them")
