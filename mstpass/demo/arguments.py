"""The demo's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mstpass.argument_parsers import command_parser

_STEPS, _QUICK_STEPS = 30, 4
_DESCRIPTION = """\
Train a small Llama on the sources of the Python standard library with eager,
Inductor and mst, from the same weights and on the same batches. Compare the
losses, the peak memory and the time of a step."""
_EXAMPLES = """\
examples:
  mstpass demo
  mstpass demo --quick --out /tmp/demo"""


@dataclass(frozen=True)
class Arguments:
    """The parsed command line of the demo."""

    steps: int
    out: Path
    quick: bool

    @staticmethod
    def parse(argv: Sequence[str]) -> Arguments:
        parser = command_parser("mstpass demo", _DESCRIPTION, _EXAMPLES)
        parser.add_argument("--steps", type=_step_count, help=f"training steps (default {_STEPS})")
        parser.add_argument(
            "--out",
            type=Path,
            default=Path("demo-out"),
            help="folder for the picture and the figures (default demo-out)",
        )
        parser.add_argument(
            "--quick", action="store_true", help=f"train a smaller model, {_QUICK_STEPS} steps"
        )
        given = parser.parse_args(argv)
        steps = given.steps or (_QUICK_STEPS if given.quick else _STEPS)
        return Arguments(steps, given.out, given.quick)


def _step_count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("it must be at least 2, because the first step compiles")
    return value
