"""The `mstpass` command: a thin front to demo, benchmarks and linter, which it imports lazily."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from mstpass.errors import UserError

BENCHES = {
    "loops": "LM heads and MLPs as loops: time and peak against Inductor and the floor",
    "peers": "a Llama-like training step: eager, Inductor, its own options, and mst",
    "losses": "one LM head under each loss: time against Inductor, peak against the floor",
    "dynamic": "many sequence lengths in turn: compilations, and time against a graph for each",
    "reconstruct": "post-norm models: saved bytes, peak, gradient error with reconstruction",
    "compile": "compile time, cold and from the caches, by depth and number of chunks",
    "solvers": "every partition solver on recorded problems of real models: peak, time, proofs",
    "pareto": "measured peak against time: torch's partitioner at its budgets, and mst",
    "budgets": "memory budgets in bytes: simulated and measured peaks of many models",
    "record": "write the partition problems of real models, traced without their memory",
    "all": "all of these that measure steps, one after the other",
}
COMMANDS = {
    "demo": "mstpass.demo",
    "explain": "mstpass.cli.explain",
    "lint": "mstpass.cli.lint",
    "plan": "mstpass.cli.plan",
}
INTERRUPTED = 130  # what a shell reports for SIGINT

EXAMPLES = """examples:
  mstpass demo                          a small Llama, trained three ways; some minutes on two cores
  mstpass demo --quick                  the same, too short to learn much
  mstpass demo --steps 200 --out /tmp/demo
  mstpass bench peers                   peak and time of each contender, side by side
  mstpass bench loops --help            a benchmark's own options
  mstpass explain train.py:loss_fn      what would be chunked, what not and why; runs nothing
  mstpass lint train.py:step            what a training step computes more often than it needs to
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 done, 1 failed, 2 called wrongly, 130 interrupted."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    module = (
        f"mstpass.bench.{arguments.bench}"
        if arguments.command == "bench"
        else COMMANDS[arguments.command]
    )
    try:
        return _entry(module)(rest)
    except KeyboardInterrupt:
        print("\nmstpass: interrupted", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(f"mstpass: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mstpass",
        description="A torch.compile backend that chunks LM heads and MLPs over the sequence.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mstpass {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # no help of their own: each command's module parses what follows its name
    commands.add_parser(
        "demo", help="train a small Llama with eager, Inductor and mst", add_help=False
    )
    commands.add_parser(
        "explain", help="the plan of a training step, without running it", add_help=False
    )
    commands.add_parser(
        "lint", help="find forwards that a training step runs twice", add_help=False
    )
    commands.add_parser(
        "plan", help="the longest sequence on a device, without the device", add_help=False
    )
    bench = commands.add_parser("bench", help="measure contenders side by side", allow_abbrev=False)
    which = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in BENCHES.items():
        which.add_parser(name, help=text, add_help=False)
    return parser


def _entry(module: str) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(module).main


def _version() -> str:
    try:
        return version("mstpass")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
