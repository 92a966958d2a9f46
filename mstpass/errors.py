"""Optional packages, and the errors that a user of the command line can mend."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec


class UserError(Exception):
    """Something the user can mend; the command line shows the message without a traceback."""


class MissingPackageError(UserError):
    """An optional package is missing; the message names the extra that brings it."""


def require(packages: Sequence[str], extra: str, purpose: str) -> None:
    """Raise `MissingPackageError` unless all of `packages` can be imported."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(missing)}: pip install 'mstpass[{extra}]'"
        )
