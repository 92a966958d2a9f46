"""Load a function of a user's file by the name ``FILE.py:FUNCTION``."""

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
    """There is no such file or function, or the file cannot be imported."""


class UserFile:
    """An imported Python file.

    Raises:
        UserFileError: there is no such file, or it cannot be imported.
    """

    def __init__(self, file: str):
        path = Path(file)
        if not path.is_file():
            raise UserFileError(f"there is no file {file}")
        self.name = file
        self._module = _import_file(path)

    def function(self, name: str) -> Callable[..., Any]:
        """One of the file's functions.

        Raises:
            UserFileError: there is no function of that name; the message lists the others.
        """
        found = getattr(self._module, name, None)
        if callable(found):
            return found
        own = self._module.__name__
        known = [
            other
            for other, value in vars(self._module).items()
            if getattr(value, "__module__", None) == own and callable(value)
        ]
        raise UserFileError(
            f"{self.name} has no function {name}; it has {', '.join(known) or 'none'}"
        )


def load_function(name: str) -> tuple[UserFile, Callable[..., Any]]:
    """The file and the function that ``FILE.py:FUNCTION`` names.

    Raises:
        UserFileError: there is no such file or function, or the file cannot be imported.
    """
    file, separator, function = name.rpartition(":")
    if not separator or not function.isidentifier():
        raise UserFileError(f"{name!r} is not of the form FILE.py:FUNCTION, such as train.py:step")
    loaded = UserFile(file)
    return loaded, loaded.function(function)


def _import_file(path: Path) -> Any:
    """The file as a module. It can import the files beside it, as it can when it is run."""
    spec = importlib.util.spec_from_file_location(f"_mstpass_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserFileError(f"importing {path} raised {error_text(error)}") from error
    return module


def error_text(error: BaseException) -> str:
    """The error, and the deepest line of the user's own code that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent.parent)
    users = [
        f
        for f in frames
        if "-packages" not in f.filename and not f.filename.startswith((ours, "<"))
    ]
    place = f" at {location(users[-1].filename, users[-1].lineno or 0)}" if users else ""
    return f"{type(error).__name__}{place}: {error}"
