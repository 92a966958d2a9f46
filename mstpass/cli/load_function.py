"""A function of a user's file, by the name ``FILE.py:FUNCTION`` that commands are given."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mstpass.errors import UserError
from mstpass.tracing.names import location


class UserFileError(UserError):
    """No such file or function, or the file cannot be imported; the message says what to do."""


class UserFile:
    """An imported file.

    Raises:
        UserFileError: there is no such file, or it cannot be imported.
    """

    def __init__(self, file: str):
        path = Path(file)
        if not path.is_file():
            raise UserFileError(f"there is no file {file}")
        self.name = file
        self._module = _imported(path)

    def function(self, name: str) -> Callable[..., Any]:
        """One of its functions.

        Raises:
            UserFileError: there is none of that name; the message names those that there are.
        """
        found = getattr(self._module, name, None)
        if callable(found):
            return found
        module = self._module
        known = [n for n, v in vars(module).items() if _defined_in(v, module) and callable(v)]
        there = ", ".join(known) or "none"
        raise UserFileError(f"{self.name} has no function {name}; it has {there}")


def load_function(name: str) -> tuple[UserFile, Callable[..., Any]]:
    """``FILE.py:FUNCTION`` as the file and the function.

    Raises:
        UserFileError: no such file or function, or the file cannot be imported.
    """
    file, separator, function = name.rpartition(":")
    if not separator or not function.isidentifier():
        raise UserFileError(f"{name!r} is not FILE.py:FUNCTION, such as train.py:step")
    loaded = UserFile(file)
    return loaded, loaded.function(function)


def _imported(path: Path) -> Any:
    """The file as a module; it finds its neighbours as it would when run."""
    spec = importlib.util.spec_from_file_location(f"_mstpass_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserFileError(f"importing {path} raised {told(error)}") from error
    return module


def _defined_in(value: Any, module: Any) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def told(error: BaseException) -> str:
    """The error, and the deepest place outside of installed packages that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent.parent)
    users = [
        f for f in frames if "-packages" not in f.filename and not f.filename.startswith((own, "<"))
    ]
    where = f" at {location(users[-1].filename, users[-1].lineno or 0)}" if users else ""
    return f"{type(error).__name__}{where}: {error}"
