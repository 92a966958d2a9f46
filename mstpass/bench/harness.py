"""What a benchmark is: its command line, its runs, a progress bar, and the files that it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mstpass.argument_parsers import command_parser, count
from mstpass.bench import results
from mstpass.bench.results import Result
from mstpass.errors import UserError, require
from mstpass.progress import progress_bar

_REPEATS, _QUICK_REPEATS = 5, 2
_BUSY = """\
On a CPU that also does other work, set OMP_WAIT_POLICY=passive: otherwise threads
that wait for each other take more time than what is measured."""

# options that only some benchmarks have
_OPTIONS: dict[str, dict[str, Any]] = {
    "large": {"action": "store_true", "help": "measure the larger model"},
    "grouped": {"action": "store_true", "help": "measure a model whose heads share keys"},
    "store": {"action": "store_true", "help": "store the measured chunk costs for later runs"},
    "problem": {"action": "append", "default": [], "help": "only this problem; may be repeated"},
    "model": {"action": "append", "default": [], "help": "only this model; may be repeated"},
    "steps": {"type": count, "metavar": "N", "help": "steps of random lengths (default 60)"},
    "csv": {"type": Path, "metavar": "PATH", "help": "write the figures of every point to PATH"},
    "plots": {
        "type": Path,
        "metavar": "DIR",
        "help": "draw peak against time, as PNG files in DIR",
    },
}


@dataclass(frozen=True)
class Arguments:
    """The parsed command line of a benchmark.

    Attributes:
        repeats: number of timed rounds.
        quick: whether to use tiny sizes.
    """

    repeats: int
    quick: bool
    device: torch.device
    large: bool = False
    grouped: bool = False
    store: bool = False
    json: Path | None = None
    markdown: Path | None = None
    problem: Sequence[str] = ()
    model: Sequence[str] = ()
    steps: int | None = None
    csv: Path | None = None
    plots: Path | None = None

    def models(self, known: Collection[str], separator: str = "; ") -> list[str]:
        """The names that ``--model`` gives; without any, all known ones.

        Raises:
            UserError: a name is unknown.
        """
        unknown = [name for name in self.model if name not in known]
        if unknown:
            names = separator.join(known)
            raise UserError(f"--model {unknown[0]!r} is unknown; choose from: {names}")
        return list(self.model or known)


@dataclass(frozen=True)
class Benchmark:
    """``mstpass bench NAME``: parse the arguments, run, show, and write the files.

    The exit status is 0 even if a target is missed or a contender fails: the tables show both.

    Attributes:
        runs: functions that measure, called one after the other.
        text: the help: what is measured, and examples.
        options: names of the options that not every benchmark has.
    """

    name: str
    runs: Sequence[Callable[[Arguments], Result]]
    text: str | None
    options: Sequence[str] = ()

    def __call__(self, argv: Sequence[str] = ()) -> int:
        arguments = self.parse(argv)
        require(("rich",), "bench", f"mstpass bench {self.name}")
        if arguments.plots is not None:
            require(("matplotlib",), "bench", f"mstpass bench {self.name} --plots")
        found: list[Result] = []
        for run in self.runs:
            found.append(run(arguments))
            results.show(found[-1], arguments.device)
            if arguments.markdown is not None:
                results.write_markdown(arguments.markdown, found[-1], arguments.device)
            if arguments.json is not None:
                settings = {"repeats": arguments.repeats, "quick": arguments.quick}
                results.write_json(arguments.json, found, arguments.device, settings)
        return 0

    def parse(self, argv: Sequence[str]) -> Arguments:
        parser = command_parser(f"mstpass bench {self.name}", f"{self.text}\n{_BUSY}")
        add = parser.add_argument
        repeats = f"timed rounds (default {_REPEATS}; with --quick {_QUICK_REPEATS})"
        add("--repeats", type=count, help=repeats)
        add("--quick", action="store_true", help="tiny sizes, to see that it runs")
        for option in self.options:
            add(f"--{option}", **_OPTIONS[option])
        add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
        add("--json", type=Path, metavar="PATH", help="write all figures to PATH")
        add(
            "--markdown",
            type=Path,
            metavar="PATH",
            help=f"write the tables into this file, between <!-- bench:{self.name} --> and "
            f"<!-- /bench:{self.name} -->, or at its end where it has no such marks; the "
            "documentation's pages are in docs/results/",
        )
        given = parser.parse_args(argv)
        given.repeats = given.repeats or (_QUICK_REPEATS if given.quick else _REPEATS)
        has_cuda = torch.cuda.is_available()
        given.device = torch.device(given.device or ("cuda" if has_cuda else "cpu"))
        if given.device.type == "cuda" and not has_cuda:
            parser.error("--device cuda: torch sees no CUDA device")
        return Arguments(**vars(given))


@contextlib.contextmanager
def advancing(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of ``total`` steps on a terminal. It shows nothing elsewhere."""
    from rich import progress

    count, passed = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    columns = ("{task.description}", progress.BarColumn(), count, passed, "{task.fields[what]}")
    with progress_bar(*columns, transient=True) as bar:
        task = bar.add_task(title, total=total, what="")
        yield lambda what: bar.update(task, advance=1, what=what)
