"""`mstpass demo`: a small Llama trained on real text with eager, Inductor and mst, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mstpass.demo.arguments import Arguments
from mstpass.errors import require

PACKAGES = ("transformers", "tokenizers", "matplotlib", "rich")


def main(argv: Sequence[str] = ()) -> int:
    """Train, compare, draw; the exit status is 0 unless the losses part ways."""
    arguments = Arguments.parse(argv)
    require(PACKAGES, "hf,viz", "mstpass demo")
    from mstpass.demo.run import run  # only now: it imports what `require` looked for

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
