"""``mstpass explain FILE.py:FUNCTION``: the plan of a user's step on the command line."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mstpass.cli.load_function import UserFileError, load_function, told
from mstpass.errors import UserError
from mstpass.explainer.errors import ExplainError
from mstpass.explainer.plan_step import explain_parts, explain_step
from mstpass.options import OptionError, from_text
from mstpass.report.report import Report

DONE, FAILED, BAD_INPUT = 0, 1, 2
Step = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]

_DESCRIPTION = """Say what torch.compile(FUNCTION, backend="mst") would do, and why, without running
it: what is cut into chunks, what is refused and what to change, what crosses from forward to
backward, and the peak memory before and after, with what is alive there.

FUNCTION returns the loss, as what you would give to torch.compile does. FILE.py is imported, not
run as a script, and FUNCTION is traced on fake tensors. Its arguments come from the function
inputs() of the same file: a tensor, a tuple of arguments, or a dict of keyword arguments. With
--build, FUNCTION is called and returns the step instead: (function, *arguments).

What breaks into several graphs has a report for each, and a file: plan.json, plan-2.json. If
FUNCTION is not compiled but calls what is, those are the graphs of what it calls.

With --device meta the file makes its model and data without memory, so that any size can be
explained on any machine."""

_EXAMPLES = """examples:
  mstpass explain train.py:loss_fn                           the plan, as text
  mstpass explain train.py:loss_fn --device meta             of a model that does not fit here
  mstpass explain train.py:loss_fn --option memory_budget=0.0 --option chunk_tokens=4096
  mstpass explain train.py:loss_fn --html plan.html          as one page to look at
  mstpass explain train.py:loss_fn --json plan.json          for a program (docs/report-json.md)
  mstpass explain train.py:make_step --build                 where a function makes the model

exit codes: 0 done, 1 the step cannot be explained, 2 called wrongly"""


class _Usage(UserError):
    """Called wrongly."""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        options = dict(map(_option, arguments.option))
        with torch.device(arguments.device) if arguments.device else contextlib.nullcontext():
            fn, args, kwargs = _step(arguments)
        pareto = arguments.pareto or arguments.html is not None
        if arguments.fullgraph:
            reports = [explain_step(fn, args, kwargs, options, pareto=pareto)]
        else:
            reports = explain_parts(fn, args, kwargs, options, pareto=pareto)
        for number, report in enumerate(reports, 1):
            _write(report, number, arguments)
    except (_Usage, UserFileError, OptionError) as error:
        print(f"mstpass explain: {error}", file=sys.stderr)
        return BAD_INPUT
    except UserError as error:
        print(f"mstpass explain: {error}", file=sys.stderr)
        return FAILED
    for number, report in enumerate(reports, 1):
        if len(reports) > 1:
            print(f"graph {number} of {len(reports)}")
        print(report)
        for point in report.details.pareto if report.details and arguments.pareto else ():
            chosen = "  <- this plan" if point.chosen else ""
            print(
                f"  {point.label:22} peak {point.peak_bytes / 2**20:12.1f} MiB, "
                f"extra time {100 * point.extra_time:5.1f} %{chosen}"
            )
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mstpass explain",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("step", metavar="FILE.py:FUNCTION", help="returns the loss")
    parser.add_argument(
        "--inputs",
        default="inputs",
        metavar="NAME",
        help="the function of the file that makes FUNCTION's arguments (default: inputs)",
    )
    parser.add_argument(
        "--build", action="store_true", help="call FUNCTION: it returns (function, *arguments)"
    )
    parser.add_argument(
        "--device", type=_device, help="where the file makes its tensors: meta takes no memory"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, as in torch.compile(..., options={NAME: VALUE})",
    )
    parser.add_argument(
        "--fullgraph",
        action="store_true",
        help="one graph, as of torch.compile(..., fullgraph=True), or an error: why there is none",
    )
    parser.add_argument(
        "--pareto", action="store_true", help="also plan at other budgets: peak against time"
    )
    for name, what in (
        ("json", "the report, for programs"),
        ("html", "one page, offline, with pictures"),
        ("dot", "the graph, for Graphviz"),
        ("svg", "the graph, drawn"),
        ("perfetto", "memory over time, for ui.perfetto.dev"),
        ("memory-viz", "memory over time, for pytorch.org/memory_viz"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"write {what}")
    return parser


def _step(arguments: argparse.Namespace) -> Step:
    name: str = arguments.step
    file, fn = load_function(name)
    if arguments.build:
        built = _called(fn, name)
        step = built if isinstance(built, tuple) else (built,)
        if not callable(step[0]):
            raise _Usage(f"{name} returned {type(step[0]).__name__}, not (function, *arguments)")
        return step[0], step[1:], {}
    if not _needs_arguments(fn):
        return fn, (), {}
    try:
        inputs = file.function(arguments.inputs)
    except UserFileError:
        raise _Usage(
            f"{name} takes arguments, and {file.name} has no function {arguments.inputs} that "
            "makes them; add one that returns a tuple of arguments or a dict of keyword arguments"
        ) from None
    made = _called(inputs, f"{file.name}:{arguments.inputs}")
    if isinstance(made, Mapping):
        return fn, (), dict(made)
    return fn, tuple(made) if isinstance(made, tuple | list) else (made,), {}


def _needs_arguments(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters.values())


def _called(fn: Callable[..., Any], name: str) -> Any:
    try:
        return fn()
    except (Exception, SystemExit) as error:
        raise ExplainError(f"{name} raised {told(error)}") from error


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise _Usage(f"--option {text}: write NAME=VALUE, such as memory_budget=0.5")
    return name, from_text(value)


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device, such as meta or cpu") from None


def _write(report: Report, number: int, arguments: argparse.Namespace) -> None:
    """The files asked for; those of later graphs than the first have a number in their names."""
    for name in ("json", "html", "dot", "svg", "perfetto", "memory_viz"):
        path = getattr(arguments, name)
        if path is None:
            continue
        if number > 1:
            path = path.with_stem(f"{path.stem}-{number}")
        try:
            if name == "dot":
                path.write_text(report.to_dot(), encoding="utf-8")
            else:
                getattr(report, f"to_{name}")(path)
        except OSError as error:
            raise ExplainError(f"cannot write {path}: {error.strerror or error}") from error
