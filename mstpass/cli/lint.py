"""``mstpass lint FILE.py:FUNCTION``: the linter on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mstpass.cli.load_function import UserFileError, load_function, told
from mstpass.linter.entry_points import lint, lint_compiled
from mstpass.linter.errors import LintError
from mstpass.linter.report import LintReport, module_lines

CLEAN, FINDINGS, BAD_INPUT = 0, 1, 2

_DESCRIPTION = """Run one training step and report which forwards ran more often than needed: nested
activation checkpoints, reentrant ones, results that nothing reads. Says what to remove.

FUNCTION takes no arguments. It runs one step, forward and backward, or returns the loss, whose
backward is run then. FILE.py is imported, not run as a script."""

_EXAMPLES = """examples:
  mstpass lint train.py:step                 one eager step
  mstpass lint train.py:step --modules       and how often each module's forward ran
  mstpass lint train.py:step --compiled      the graphs of a step that calls torch.compile'd code
  mstpass lint train.py:step --json out.json --min-share 0.01

exit codes: 0 clean, 1 findings, 2 the step cannot be linted"""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        report = _report(arguments)
        if arguments.json is not None:
            _write(report, arguments.json)
    except (LintError, UserFileError) as error:
        print(f"mstpass lint: {error}", file=sys.stderr)
        return BAD_INPUT
    print(report)
    if arguments.modules and report.modules:
        print("\n" + "\n".join(module_lines(report)))
    return FINDINGS if report.findings else CLEAN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mstpass lint",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("step", metavar="FILE.py:FUNCTION", help="the training step")
    parser.add_argument(
        "--compiled", action="store_true", help="read the graphs that Inductor gets, not eager ops"
    )
    parser.add_argument("--modules", action="store_true", help="list how often each module ran")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there as well")
    parser.add_argument(
        "--min-share",
        type=_share,
        default=0.0,
        metavar="X",
        help="leave out findings below this share of the step's flops (default 0)",
    )
    return parser


def _report(arguments: argparse.Namespace) -> LintReport:
    _, step = load_function(arguments.step)
    run = lint_compiled if arguments.compiled else lint
    try:
        report = run(step)
    except LintError:
        raise
    except (Exception, SystemExit) as error:
        raise LintError(f"{arguments.step} raised {told(error)}") from error
    return report.above(arguments.min_share)


def _write(report: LintReport, path: Path) -> None:
    try:
        report.to_json(path)
    except OSError as error:
        raise LintError(f"cannot write {path}: {error.strerror}") from error


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("between 0 and 1")
    return value
