"""``python -m mstpass.torch_internals``: run every probe; exit with 1 where one fails."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

import mstpass.torch_internals as package
from mstpass.torch_internals.versions import CHECKED

_NO_PROBE = ("__main__", "patches", "private_apis", "versions")


def main() -> int:
    sys.stdout.write(
        f"The private APIs of torch {torch.__version__} that mstpass uses; "
        f"checked with torch {', '.join(CHECKED)}\n"
    )
    failed = 0
    for name in names():
        purpose, apis, wrong = _row(name)
        failed += bool(wrong)
        lines = [f"{name}: {wrong or 'ok'}", f"  {purpose}", *(f"    {api}" for api in apis)]
        sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.write(f"\n{failed} of {len(list(names()))} files do not fit this torch\n")
    return 1 if failed else 0


def names() -> Iterator[str]:
    """The files that have a probe."""
    for found in pkgutil.iter_modules(package.__path__):
        if found.name not in _NO_PROBE:
            yield found.name


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{package.__name__}.{name}")


def _row(name: str) -> tuple[str, tuple[str, ...], str]:
    """What the file is for, its APIs, and what is wrong."""
    try:
        module = load(name)
    except Exception as error:
        return "", (), _text(error)
    purpose = (inspect.getdoc(module) or "").partition("\n")[0]
    try:
        module.probe()
    except Exception as error:
        return purpose, module.APIS.names, _text(error)
    return purpose, module.APIS.names, ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
