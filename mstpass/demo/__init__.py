"""Train a small Llama on the sources of the Python standard library with eager,
Inductor and mst, from the same weights and on the same batches. Compare the
losses, the peak memory and the time of a step.

examples:
  mstpass demo
  mstpass demo --quick --out /tmp/demo
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mstpass.argument_parsers import command_parser
from mstpass.errors import require

PACKAGES = ("transformers", "tokenizers", "matplotlib", "rich")
_STEPS, _QUICK_STEPS = 30, 4
_OUT = Path("demo-out")


def main(argv: Sequence[str] = ()) -> int:
    """Run the demo. The exit status is 0 if the losses of all backends agree, else 1."""
    given = parse(argv)
    require(PACKAGES, "hf,viz", "mstpass demo")
    from mstpass.demo.run import run  # it imports the packages that `require` has checked

    return run(given.steps, given.out, given.quick)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """``steps``, the folder ``out``, and whether to be ``quick``."""
    add = (parser := command_parser("mstpass demo", __doc__)).add_argument
    out, quick = "folder for the picture and the figures", "train a smaller model"
    add("--steps", type=_step_count, help=f"training steps (default {_STEPS})")
    add("--out", type=Path, default=_OUT, help=f"{out} (default {_OUT})")
    add("--quick", action="store_true", help=f"{quick}, {_QUICK_STEPS} steps")
    given = parser.parse_args(argv)
    given.steps = given.steps or (_QUICK_STEPS if given.quick else _STEPS)
    return given


def _step_count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("it must be at least 2, because the first step compiles")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
