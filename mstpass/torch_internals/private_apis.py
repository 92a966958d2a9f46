"""What a file of this package needs of torch, and the error that names what a torch lacks.

A *probe* asks an installed torch whether an API is there and does what mstpass expects of it: its
name, the names of its parameters and, where that costs little, its behavior in a small case.
"""

from __future__ import annotations

import dataclasses
import inspect
from pkgutil import resolve_name

import torch

from mstpass.torch_internals.versions import CHECKED


class TorchChangedError(RuntimeError):
    """The installed torch lacks a private API, or has changed it; ``wrong`` says which and how."""

    def __init__(self, wrong: str):
        versions = ", ".join(CHECKED)
        super().__init__(
            f"torch {torch.__version__}: {wrong} (mstpass was checked with torch {versions})"
        )


class LostLoopError(RuntimeError):
    """A loop that was planned is not in what torch compiled, or not where it must be."""


@dataclasses.dataclass(frozen=True)
class PrivateApis:
    """The private APIs that one file uses.

    Attributes:
        names: dotted, with the parameters that are passed by name in parentheses. ``a | b`` stands
            for an API that has had several names. The versions of torch that all of them were
            checked on are in versions.py.
    """

    names: tuple[str, ...]

    def require(self) -> None:
        """Check that all APIs exist and have their parameters.

        Raises:
            TorchChangedError: one does not.
        """
        for name in self.names:
            wrong = [_wrong(alternative) for alternative in name.split(" | ")]
            self.expect(not all(wrong), "; ".join(wrong))

    def expect(self, holds: bool, wrong: str) -> None:
        """Check a behavior; ``wrong`` says what is different where it does not hold.

        Raises:
            TorchChangedError: it does not hold.
        """
        if not holds:
            raise TorchChangedError(wrong)


def _wrong(name: str) -> str:
    """What is wrong with an API; empty where nothing is."""
    path, _, parameters = name.rstrip(")").partition("(")
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError):
        return f"{path} is missing"
    if not parameters:
        return ""
    known = inspect.signature(found).parameters
    missing = [name for name in parameters.split(", ") if name not in known]
    return f"{path} has no parameter {', '.join(missing)}" if missing else ""
