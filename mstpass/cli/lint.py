"""Run one training step, report which forwards ran more often than needed, and
say what to remove. Causes are nested activation checkpoints, reentrant
checkpoints, and recomputed results that nothing reads.

FUNCTION takes no arguments. It runs forward and backward of one step, or it
returns the loss; then the linter runs the backward. FILE.py is imported, not
run as a script.

examples:
  mstpass lint train.py:step               one eager step
  mstpass lint train.py:step --modules     also list how often each module ran
  mstpass lint train.py:step --compiled    a step that calls compiled functions
  mstpass lint train.py:step --gpu h100    as on a GPU, which need not be there
  mstpass lint train.py:step --json out.json --min-share 0.01

exit codes: 0 no findings, 1 findings, 2 the step cannot be linted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mstpass.argument_parsers import add_gpu, command_parser, share
from mstpass.cli.load_function import error_text, load_function
from mstpass.errors import UserError
from mstpass.linter import lint, lint_compiled
from mstpass.linter.report import LintError, LintReport, module_lines
from mstpass.tracing.devices import made_for, traced_for

NO_FINDINGS, FINDINGS, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        report = _report(arguments)
        if arguments.json is not None:
            _write(report, arguments.json)
    except UserError as error:
        print(f"mstpass lint: {error}", file=sys.stderr)
        return BAD_INPUT
    print(report)
    if arguments.modules and report.modules:
        print("\n" + "\n".join(module_lines(report)))
    return FINDINGS if report.findings else NO_FINDINGS


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mstpass lint", __doc__)
    parser.add_argument("step", metavar="FILE.py:FUNCTION", help="runs the training step")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="check the graphs that Inductor gets instead of the eager ops",
    )
    parser.add_argument(
        "--modules", action="store_true", help="also list how often each module's forward ran"
    )
    parser.add_argument(
        "--device",
        choices=("cuda",),
        help="run the step on fake tensors of a GPU: it needs none, and nothing is computed",
    )
    add_gpu(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report as JSON")
    parser.add_argument(
        "--min-share",
        type=share,
        default=0.0,
        metavar="X",
        help="leave out findings below this share of the step's flops, 0 to 1 (default: 0)",
    )
    return parser


def _report(arguments: argparse.Namespace) -> LintReport:
    on_gpu = arguments.device is not None or arguments.gpu is not None
    if on_gpu and arguments.compiled:
        raise LintError(
            "--compiled runs the compiled step, on the tensors that it has: leave out "
            "--device and --gpu, or --compiled"
        )
    with traced_for("cuda" if on_gpu else None, arguments.gpu) as device:
        _, step = made_for(device, lambda: load_function(arguments.step))
        return _run(step, arguments, device).above(arguments.min_share)


def _run(step: Callable[..., Any], arguments: argparse.Namespace, device: Any) -> LintReport:
    try:
        return lint_compiled(step) if arguments.compiled else lint(step, device=device)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise LintError(f"{arguments.step} raised {error_text(error)}") from error


def _write(report: LintReport, path: Path) -> None:
    try:
        report.to_json(path)
    except OSError as error:
        raise LintError(f"cannot write {path}: {error.strerror}") from error
