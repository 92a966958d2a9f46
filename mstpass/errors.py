"""Errors that a user can solve, and the check for optional packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec


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
