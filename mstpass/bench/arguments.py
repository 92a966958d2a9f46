"""The command line of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mstpass.argument_parsers import command_parser, count

_REPEATS, _QUICK_REPEATS = 5, 2
_BUSY = """\
On a CPU that also does other work, set OMP_WAIT_POLICY=passive: otherwise threads
that wait for each other take more time than what is measured."""

# options that only some benchmarks have
_EXTRA: dict[str, dict[str, Any]] = {
    "large": {"action": "store_true", "help": "measure the larger model"},
    "store": {"action": "store_true", "help": "store the measured chunk costs for later runs"},
    "problem": {"action": "append", "default": [], "help": "only this problem; may be repeated"},
    "model": {"action": "append", "default": [], "help": "only this model; may be repeated"},
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
    store: bool = False
    json: Path | None = None
    markdown: Path | None = None
    problem: Sequence[str] = ()
    model: Sequence[str] = ()
    csv: Path | None = None
    plots: Path | None = None


def parse(
    name: str,
    argv: Sequence[str],
    description: str,
    examples: str,
    extra: Sequence[str] = (),
) -> Arguments:
    """Parse the arguments of ``mstpass bench NAME``, which has the ``extra`` options besides."""
    epilog = f"examples:\n{examples}\n{_BUSY}"
    parser = command_parser(f"mstpass bench {name}", description, epilog)
    parser.add_argument(
        "--repeats",
        type=count,
        help=f"timed rounds (default {_REPEATS}; with --quick {_QUICK_REPEATS})",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    for option in extra:
        parser.add_argument(f"--{option}", **_EXTRA[option])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to PATH")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="PATH",
        help=f"write the tables into this file, between <!-- bench:{name} --> and "
        f"<!-- /bench:{name} -->, or at its end where it has no such marks; the documentation's "
        "pages are in docs/results/",
    )
    given = parser.parse_args(argv)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return Arguments(
        repeats=given.repeats or (_QUICK_REPEATS if given.quick else _REPEATS),
        quick=given.quick,
        device=device,
        json=given.json,
        markdown=given.markdown,
        **{option: getattr(given, option) for option in extra},
    )
