"""`mstpass bench all`: runs every benchmark that measures steps, one after the other."""

from __future__ import annotations

from mstpass.bench import (
    budgets,
    compile,
    dynamic,
    experts,
    long,
    loops,
    losses,
    optimizer,
    pareto,
    peers,
    planning_time,
    reconstruct,
)
from mstpass.bench.command import Command

_DESCRIPTION = """\
Run every benchmark that measures steps, one after the other."""
EXAMPLES = """  mstpass bench all --markdown today.md
  mstpass bench all --quick
"""
BENCHES = (
    peers,
    loops,
    losses,
    dynamic,
    reconstruct,
    compile,
    planning_time,
    pareto,
    budgets,
    long,
    optimizer,
)
_RUNS = (*(bench.run for bench in BENCHES), *experts.RUNS)


main = Command("all", _RUNS, _DESCRIPTION, EXAMPLES)
