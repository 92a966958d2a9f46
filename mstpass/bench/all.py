"""Run every benchmark that measures steps, one after the other.

examples:
  mstpass bench all --markdown today.md
  mstpass bench all --quick
"""

from __future__ import annotations

from importlib import import_module

from mstpass.bench.harness import Benchmark

NAMES = (
    *("peers", "loops", "losses", "dynamic", "reconstruct", "compile", "pareto", "budgets"),
    *("long", "optimizer", "experts", "axes"),
)
_RUNS = [run for name in NAMES for run in import_module(f"mstpass.bench.{name}").main.runs]

main = Benchmark("all", _RUNS, __doc__)
