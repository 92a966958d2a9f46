"""Compile random models with random options, run each one, and compare: loss and
gradients with float64, the plan with what it promises. A case is named by a
seed and a number, and is the same on every machine.

Without --inductor the rewritten graphs run op by op, and no C++ compiler is
needed: a case takes one to two seconds of one core. With --inductor it takes
ten to twenty: it is compiled by Inductor, and its peak memory is measured.

Results are kept in --folder as they come. The same command goes on where an
interrupted one ended. A case that fails is shrunk to a few lines of Python,
which are printed as a test, and kept in the folder as well.

examples:
  mstpass fuzz                             200 cases, op by op
  mstpass fuzz --cases 20000 --jobs 4      a campaign; may be interrupted
  mstpass fuzz --cases 100 --inductor      under Inductor
  mstpass fuzz --seed 3 --only 1234        one case again, with its source
  mstpass fuzz --minutes 10 --cases 100000 as many as fit into ten minutes

exit codes: 0 all cases held, 1 a case failed, 2 wrong arguments,
130 interrupted (with a summary of what has run)
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mstpass.argument_parsers import command_parser, count
from mstpass.errors import require
from mstpass.fuzz.campaign import Campaign, Result
from mstpass.progress import progress_bar

HELD, FAILED = 0, 1


def main(argv: Sequence[str] = ()) -> int:
    arguments = _parser().parse_args(argv)
    require(("rich",), "viz", "mstpass fuzz")
    kind = "inductor" if arguments.inductor else "fast"
    campaign = Campaign(kind, arguments.seed, arguments.folder, arguments.case_seconds)
    if arguments.only is not None:
        return _one(campaign, arguments.only)
    numbers = range(arguments.first, arguments.first + arguments.cases)
    try:
        with _progress(len(numbers)) as advance:
            limited = _until(numbers, 60 * arguments.minutes if arguments.minutes else None)
            campaign.run(limited, arguments.jobs, advance)
    finally:
        ways = _summary(campaign, numbers)
    if ways and not arguments.as_they_are:
        for way, failing in ways.items():
            _print_reduced(campaign, way, failing[0])
    return FAILED if ways else HELD


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mstpass fuzz", __doc__)
    add = parser.add_argument
    add("--cases", type=count, default=200, metavar="N", help="how many (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="which ones (default: %(default)s)")
    add("--first", type=int, default=0, metavar="K", help="number of the first (default: 0)")
    add("--only", type=int, metavar="NUMBER", help="run this case, and print its source")
    add("--inductor", action="store_true", help="compile every case with Inductor")
    add("--jobs", type=count, default=1, metavar="N", help="worker processes (default: 1)")
    add("--minutes", type=float, metavar="M", help="start no case after this time")
    add(
        "--case-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="a case that takes longer has failed (default: 120)",
    )
    add(
        "--folder",
        type=Path,
        default=Path("fuzz-results"),
        help="where results are kept (default: %(default)s)",
    )
    add("--as-they-are", action="store_true", help="do not shrink the cases that fail")
    return parser


def _one(campaign: Campaign, number: int) -> int:
    # These import torch, which takes seconds.
    from mstpass.fuzz.case import CALL, draw
    from mstpass.fuzz.checks import check_case
    from mstpass.fuzz.render import source

    case = draw(campaign.seed, number)
    print(f"{source(case)}\n# {case.other_than_plain(CALL)}", flush=True)
    checked = check_case(case, campaign.kind)
    print(f"# {checked.status} in {checked.seconds} s {checked.reason}")
    for failure in checked.failures:
        print(f"# {failure}")
    return FAILED if checked.failures else HELD


def _until(numbers: Sequence[int], limit_s: float | None) -> Iterator[int]:
    """The numbers, until the time is up."""
    end = None if limit_s is None else time.monotonic() + limit_s
    for number in numbers:
        if end is not None and time.monotonic() > end:
            return
        yield number


def _summary(campaign: Campaign, numbers: Sequence[int]) -> dict[str, list[int]]:
    """Print the summary; the numbers of the cases that fail in each way."""
    from mstpass.fuzz.reduce import distinct_failures, summary_lines

    results = [result for number, result in campaign.known().items() if number in numbers]
    print("\n".join(summary_lines(results)))
    return distinct_failures(results)


def _print_reduced(campaign: Campaign, way: str, number: int) -> None:
    print(f"\n# {way}: case {number} of seed {campaign.seed}, shrunk", flush=True)
    answer = campaign.reduced(number)
    print(answer.get("test") or f"# it could not be shrunk: {answer['failures'][0]['text']}")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Result], None]]:
    # rich is optional
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    with progress_bar(*columns) as bar:
        task, failed = bar.add_task("", total=total), 0

        def advance(result: Result) -> None:
            nonlocal failed
            failed += result["status"] == "failed"
            bar.update(task, advance=1, description=f"{failed} failed")

        yield advance


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
