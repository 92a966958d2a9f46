"""Errors that a user can solve, and the check for optional packages."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from importlib.util import find_spec

_OWN_FILES = os.path.dirname(__file__)


class UserError(Exception):
    """An error that the user can solve; the command line prints its message, and no traceback."""


class MissingPackageError(UserError):
    """An optional package is not installed; the message says how to install it."""


def require(packages: Sequence[str], extra: str, purpose: str) -> None:
    """Raise `MissingPackageError` unless all packages can be imported.

    Args:
        extra: the extra of mstpass that installs them.
        purpose: what needs them, for the message.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(missing)}: pip install 'mstpass[{extra}]'"
        )


def told(error: BaseException) -> str:
    """``lanes.py:12: ValueError: message``, with the last line of ours that led to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_OWN_FILES)] or frames
    place = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in own[-1:]]
    return ": ".join([*place, type(error).__name__, *([str(error)] if str(error) else [])])


def please_report(what: str, done: str) -> str:
    """The text of a warning about a failure of ours, after which ``done`` was done."""
    return (
        f"mstpass failed on a graph and {done}. {what}. "
        "Please report the error that options={'strict': True} raises."
    )
