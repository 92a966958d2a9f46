"""`mstpass demo`: trains a small Llama on real text with eager, Inductor and mst, and compares."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mstpass.demo.arguments import Arguments
from mstpass.errors import require

PACKAGES = ("transformers", "tokenizers", "matplotlib", "rich")


def main(argv: Sequence[str] = ()) -> int:
    """Run the demo. The exit status is 0 if the losses of all backends agree, else 1."""
    arguments = Arguments.parse(argv)
    require(PACKAGES, "hf,viz", "mstpass demo")
    from mstpass.demo.run import run  # it imports the packages that `require` has checked

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
