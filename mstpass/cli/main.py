"""A torch.compile backend that runs LM heads and MLPs in chunks of tokens.

examples:
  mstpass explain train.py:loss_fn    what runs in chunks, what not, and why
  mstpass lint train.py:step          what a step computes too often
  mstpass plan --model llama3-8b --device-memory 80GiB
                                      the longest sequence that fits
  mstpass demo                        train a small Llama in three ways; this
                                      takes some minutes on two cores
  mstpass demo --quick                a smaller model and fewer steps
  mstpass bench peers                 peak and time of mst and others
  mstpass bench loops --help          the options of a benchmark
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from mstpass.argument_parsers import command_parser
from mstpass.errors import UserError

BENCHES = {
    "loops": "LM heads and MLPs as loops: time and peak, against Inductor and lower bounds",
    "peers": "a Llama-like training step with eager, Inductor, its own options, and mst",
    "losses": "one LM head under each loss: time and peak, against Inductor and lower bounds",
    "axes": "losses and layers in loops along different axes: time and peak, against Inductor",
    "sharded": "an LM head whose vocabulary two processes share: time and peak of a rank",
    "dynamic": "many sequence lengths in turn: number of compilations, and time",
    "reconstruct": "post-norm models with reconstruction: saved bytes, peak, gradient error",
    "compile": "compile time without and with caches, by depth and number of chunks",
    "solvers": "every partition solver on recorded problems of real models",
    "pareto": "measured peak against time, at many budgets: torch's partitioner and mst",
    "long": "a long sequence at the least memory, with and without loops over heads",
    "experts": "a layer of experts whose rows are sorted: peak and time at several budgets",
    "architectures": "what is taken of 45 Hugging Face architectures: peak and time of each",
    "optimizer": "what an optimizer's step allocates, in eager and compiled",
    "budgets": "memory budgets in bytes: simulated and measured peaks of many models",
    "fsdp": "a Llama-like step under FSDP2 on two ranks: peak of a rank, and time",
    "sequences": "one sequence on 1, 2 and 4 ranks: peak of a rank, and time",
    "trainers": "steps of transformers' Trainer and TRL's GRPO, in eager, Inductor and mst",
    "training": "models trained from real text: loss curves of eager and mst, the same bits again",
    "gpu": "everything on a CUDA device, resumable: loops, heads, blocks, longest sequences",
    "record": "write the partition problems of real models, traced without memory",
    "all": "all benchmarks that measure steps, one after the other",
}
COMMANDS = {  # name -> module, help
    "explain": ("mstpass.cli.explain", "show the plan of a training step, without running it"),
    "lint": ("mstpass.cli.lint", "find forwards that a step runs more often than needed"),
    "plan": ("mstpass.cli.plan", "find the longest sequence that fits on a device, without it"),
    "fuzz": ("mstpass.cli.fuzz", "compile random programs, and check what mstpass promises"),
    "demo": ("mstpass.demo", "train a small Llama with eager, Inductor and mst"),
}
INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, whose module is imported only now, so that ``--help`` is quick.

    Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted.
    """
    arguments, rest = _parser().parse_known_args(argv)
    is_bench = arguments.command == "bench"
    module = f"mstpass.bench.{arguments.bench}" if is_bench else COMMANDS[arguments.command][0]
    try:
        return _entry(module)(rest)
    except KeyboardInterrupt:
        print("\nmstpass: interrupted", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(f"mstpass: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mstpass", __doc__)
    parser.add_argument("--version", action="version", version=f"mstpass {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        # Without help here: the command's module parses all that follows, --help included.
        commands.add_parser(name, help=text, add_help=False)
    bench = commands.add_parser("bench", help="measure mst and others", allow_abbrev=False)
    which = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in BENCHES.items():
        which.add_parser(name, help=text, add_help=False)
    return parser


def _entry(module: str) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(module).main


def _version() -> str:
    try:
        return version("mstpass")
    except PackageNotFoundError:  # a source tree that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
