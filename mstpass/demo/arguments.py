"""The demo's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STEPS, _QUICK_STEPS = 30, 4


@dataclass(frozen=True)
class Arguments:
    """The demo's command line."""

    steps: int
    out: Path
    quick: bool

    @staticmethod
    def parse(argv: Sequence[str]) -> Arguments:
        parser = argparse.ArgumentParser(
            prog="mstpass demo",
            description="Train a small Llama on the Python standard library's sources with eager, "
            "Inductor and mst, from the same weights and on the same batches; compare the losses, "
            "the peak memory and the time of a step.",
            allow_abbrev=False,
        )
        parser.add_argument("--steps", type=_step_count, help=f"training steps (default {_STEPS})")
        parser.add_argument(
            "--out", type=Path, default=Path("demo-out"), help="folder of the picture (demo-out)"
        )
        parser.add_argument(
            "--quick", action="store_true", help=f"a smaller model, {_QUICK_STEPS} steps"
        )
        given = parser.parse_args(argv)
        steps = given.steps or (_QUICK_STEPS if given.quick else _STEPS)
        return Arguments(steps, given.out, given.quick)


def _step_count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("at least 2 steps: the first one compiles")
    return value
