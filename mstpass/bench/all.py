"""`mstpass bench all`: runs every benchmark that measures steps, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mstpass.bench import (
    budgets,
    command,
    compile,
    dynamic,
    loops,
    losses,
    pareto,
    peers,
    planning_time,
    reconstruct,
)

_DESCRIPTION = """\
Run every benchmark that measures steps, one after the other."""
EXAMPLES = """  mstpass bench all --markdown today.md
  mstpass bench all --quick
"""
BENCHES = (peers, loops, losses, dynamic, reconstruct, compile, planning_time, pareto, budgets)


def main(argv: Sequence[str] = ()) -> int:
    return command.main(
        "all",
        [bench.run for bench in BENCHES],
        argv,
        description=_DESCRIPTION,
        examples=EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
