"""The command line of `mstpass bench gpu`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mstpass.argument_parsers import byte_size, command_parser
from mstpass.bench.gpu.parts import PARTS
from mstpass.bench.gpu.rows import Settings
from mstpass.bench.processes import ROOT

RESULTS = ROOT / "docs" / "results"
_OUT = Path("gpu-out")
_MINUTES, _DRY_MINUTES = 10.0, 60.0
_DESCRIPTION = """\
Measure mst and others on this machine's CUDA device: the CUDA tests, loops
and what their chunks cost, LM heads at Llama-3 sizes, Llama-3-8B-shaped
blocks under memory budgets, and the longest sequence that fits. No network
is needed. Each finished row is kept at once; a second call goes on with what
is missing."""
_EXAMPLES = """\
examples:
  mstpass bench gpu                         ten minutes; call it again to go on
  mstpass bench gpu --part heads --part blocks
  mstpass bench gpu --out /tmp/gpu --minutes 60
  mstpass bench gpu --dry-run --quick       on any machine, without a GPU
  mstpass bench gpu --tables                write the tables again, measure nothing

exit codes: 0 all rows are finished, whatever they say; 1 failed; 2 wrong
arguments, or this machine cannot run it; 3 the time is over and rows are left
for another call; 130 interrupted, with all finished rows kept"""


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    Attributes:
        settings: what the workers know as well.
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
    parser = command_parser("mstpass bench gpu", _DESCRIPTION, _EXAMPLES)
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
    memory = "the memory that the search for the longest sequence may use (default: 24GiB)"
    add("--part", action="append", choices=tuple(PARTS), metavar="NAME", help=part)
    add("--out", type=Path, metavar="DIR", help=out)
    add("--minutes", type=_minutes, help=most)
    add("--quick", action="store_true", help="tiny sizes, to see that it runs")
    add("--dry-run", action="store_true", help=dry)
    add("--tables", action="store_true", help="write the tables of the rows in DIR again")
    add("--memory", type=byte_size, default=Settings.memory_bytes, metavar="SIZE", help=memory)
    given = parser.parse_args(argv)
    published = RESULTS.is_dir() and not (given.quick or given.dry_run)
    settings = Settings(
        out=given.out or (RESULTS if published else _OUT),
        quick=given.quick,
        dry=given.dry_run,
        memory_bytes=given.memory,
    )
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
