"""Show what torch.compile(FUNCTION, backend="mst") would do, without running the
step: which parts run in chunks, which parts do not, why, and what to change;
what forward saves for backward; and the peak memory, and that of Inductor alone.

FUNCTION returns the loss, like the function that you give to torch.compile.
FILE.py is imported, not run as a script, and FUNCTION is traced on fake
tensors. The function inputs() of the same file makes the arguments: a tensor,
a tuple of arguments, or a dict of keyword arguments. With --build, FUNCTION
takes no arguments and returns the step instead: (function, *arguments).

A step that breaks into several graphs has one report for each graph, and one
file for each: plan.json, plan-2.json. If FUNCTION is not compiled but calls
compiled functions, the reports are those of their graphs.

With --device meta, the file makes its model and its data without memory. So
you can explain a step of any size on any machine. With --device cuda, the step
is planned for a GPU, here or elsewhere: for that of this machine, or for the
kind that --gpu names. No GPU is needed, and no memory.

examples:
  mstpass explain train.py:loss_fn                     print the plan
  mstpass explain train.py:loss_fn --device meta       a model of any size
  mstpass explain train.py:loss_fn --device cuda --gpu h100
  mstpass explain train.py:loss_fn --html plan.html    a page for the browser
  mstpass explain train.py:loss_fn --json plan.json    for programs
  mstpass explain train.py:make_step --build           make_step() makes the step
  mstpass explain train.py:loss_fn --option memory_budget=0.0

exit codes: 0 done, 1 the step cannot be explained, 2 wrong arguments
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mstpass.argument_parsers import add_gpu, command_parser
from mstpass.byte_sizes import bytes_text
from mstpass.cli.load_function import UserFileError, error_text, load_function
from mstpass.errors import UserError
from mstpass.explainer.errors import ExplainError
from mstpass.explainer.plan_step import explain_parts
from mstpass.options import OptionError, parse_value
from mstpass.report.report import Report
from mstpass.tracing.devices import DeviceError, made_for, traced_for

DONE, FAILED, BAD_INPUT = 0, 1, 2
Step = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


_FILES = {  # option -> what it writes
    "json": "the report as JSON, for programs",
    "html": "the report as one HTML page that works offline",
    "dot": "the graph as text for Graphviz",
    "svg": "a picture of the graph",
    "perfetto": "memory over time, for ui.perfetto.dev",
    "memory-viz": "memory over time, for pytorch.org/memory_viz",
}


class _Usage(UserError):
    """The command's arguments are wrong."""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        reports = _reports(arguments)
        for number, report in enumerate(reports, 1):
            _write_files(report, number, arguments)
    except (_Usage, UserFileError, OptionError, DeviceError) as error:
        print(f"mstpass explain: {error}", file=sys.stderr)
        return BAD_INPUT
    except UserError as error:
        print(f"mstpass explain: {error}", file=sys.stderr)
        return FAILED
    for number, report in enumerate(reports, 1):
        if len(reports) > 1:
            print(f"graph {number} of {len(reports)}")
        print(report)
        if arguments.pareto:
            _print_pareto(report)
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mstpass explain", __doc__)
    parser.add_argument("step", metavar="FILE.py:FUNCTION", help="the function returns the loss")
    parser.add_argument(
        "--inputs",
        default="inputs",
        metavar="NAME",
        help="the function of the file that makes the arguments (default: inputs)",
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="call FUNCTION, and explain the (function, *arguments) that it returns",
    )
    parser.add_argument(
        "--device",
        type=_device,
        help="the default device while the file makes its tensors; meta takes no memory; cuda "
        "plans for a GPU, and needs none",
    )
    add_gpu(parser)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, as in torch.compile(..., options={NAME: VALUE}); "
        "may be given several times",
    )
    parser.add_argument(
        "--fullgraph",
        action="store_true",
        help="explain the step as one graph, as torch.compile(..., fullgraph=True) compiles it, "
        "or say why it is not one graph",
    )
    parser.add_argument(
        "--pareto",
        action="store_true",
        help="also plan at other memory budgets, and print their peaks and times",
    )
    for name, content in _FILES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"write {content}")
    return parser


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a device such as meta, cpu or cuda"
        ) from None


# ---- the step ----------------------------------------------------------------------------------
def _reports(arguments: argparse.Namespace) -> list[Report]:
    options = dict(map(_option, arguments.option))
    pareto = arguments.pareto or arguments.html is not None
    given: torch.device | None = arguments.device
    if arguments.gpu is not None and given is None:
        given = torch.device("cuda")
    # Without a kind of GPU, other devices are those of the tensors that the file makes.
    on_cuda = given is not None and given.type == "cuda"
    target = given if on_cuda or arguments.gpu is not None else None
    with traced_for(target, arguments.gpu) as device:
        fn, args, kwargs = made_for(given, lambda: _load_step(arguments))
        whole = arguments.fullgraph
        return explain_parts(fn, args, kwargs, options, pareto, device, fullgraph=whole)


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise _Usage(f"--option {text}: write NAME=VALUE, such as memory_budget=0.5")
    return name, parse_value(value)


def _load_step(arguments: argparse.Namespace) -> Step:
    """The function to explain, its arguments, and its keyword arguments."""
    name: str = arguments.step
    file, fn = load_function(name)
    if arguments.build:
        built = _call(fn, name)
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
    made = _call(inputs, f"{file.name}:{arguments.inputs}")
    if isinstance(made, Mapping):
        return fn, (), dict(made)
    return fn, tuple(made) if isinstance(made, tuple | list) else (made,), {}


def _needs_arguments(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variadic for p in parameters.values())


def _call(fn: Callable[..., Any], name: str) -> Any:
    try:
        return fn()
    except (Exception, SystemExit) as error:
        raise ExplainError(f"{name} raised {error_text(error)}") from error


# ---- output ------------------------------------------------------------------------------------
def _print_pareto(report: Report) -> None:
    """The plans at other budgets, one line each."""
    for point in report.details.pareto if report.details else ():
        chosen = "  <- this plan" if point.chosen else ""
        print(
            f"  {point.label:22} peak {bytes_text(point.peak_bytes):>10}, "
            f"extra time {100 * point.extra_time:5.1f} %{chosen}"
        )


def _write_files(report: Report, number: int, arguments: argparse.Namespace) -> None:
    """The files asked for; the second graph's are numbered 2, and so on."""
    for option in _FILES:
        name = option.replace("-", "_")
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
