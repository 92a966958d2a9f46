"""The package's source files, each parsed once for all tests that read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import mstpass

ROOT = Path(mstpass.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """From the package on: ``graph/ops.py``."""
    return path.relative_to(ROOT).as_posix()
