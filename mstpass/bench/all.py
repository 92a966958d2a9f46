"""`mstpass bench all`: runs every benchmark that measures steps, one after the other."""

from __future__ import annotations

from importlib import import_module

from mstpass.bench.harness import Benchmark

_DESCRIPTION = """\
Run every benchmark that measures steps, one after the other."""
EXAMPLES = """  mstpass bench all --markdown today.md
  mstpass bench all --quick
"""
NAMES = (
    *("peers", "loops", "losses", "dynamic", "reconstruct", "compile", "pareto", "budgets"),
    *("long", "optimizer", "experts", "axes"),
)
_RUNS = [run for name in NAMES for run in import_module(f"mstpass.bench.{name}").main.runs]

main = Benchmark("all", _RUNS, _DESCRIPTION, EXAMPLES)
