"""`mstpass bench all`: every benchmark, one after the other; their files grow as each one ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mstpass.bench import common, compile, dynamic, loops, losses, peers, reconstruct

EXAMPLES = """  mstpass bench all --markdown docs/results/today.md
  mstpass bench all --quick
"""


def main(argv: Sequence[str] = ()) -> int:
    return common.main(
        "all",
        [peers.run, loops.run, losses.run, dynamic.run, reconstruct.run, compile.run],
        argv,
        description="The other benchmarks, one after the other.",
        examples=EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
