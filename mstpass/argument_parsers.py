"""Parsers for the commands: one layout of their help, and the types of their arguments."""

from __future__ import annotations

import argparse
from typing import Any

from mstpass.byte_sizes import parse_bytes
from mstpass.gpus import GPUS, UnknownGpuError, gpu


def command_parser(prog: str, text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a text, such as a docstring; what follows "examples:" comes last."""
    description, *examples = (text or "").partition("examples:")
    return argparse.ArgumentParser(
        prog=prog,
        description=description.strip(),
        epilog="".join(examples).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def byte_size(text: str) -> int:
    """``80GiB`` or a number of bytes."""
    size = int(text) if text.isdigit() else parse_bytes(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GiB or 512MiB")
    return size


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


def add_gpu(parser: Any) -> None:
    """Add the option ``--gpu`` to a parser or a group of options."""
    parser.add_argument(
        "--gpu",
        type=_gpu,
        metavar="KIND",
        help=f"plan for this kind of GPU: {', '.join(GPUS)} (default: the GPU of this machine; "
        "where it has none, h100)",
    )


def _gpu(name: str) -> str:
    try:
        return gpu(name).name
    except UnknownGpuError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
