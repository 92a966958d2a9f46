"""What holds of every function of the package, as its source says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "mstpass"
FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_assertion_has_a_sentence(path: Path) -> None:
    """An assertion that does not hold is told in a report, which must say what was expected."""
    nodes = ast.walk(ast.parse(path.read_text()))
    bare = [node.lineno for node in nodes if isinstance(node, ast.Assert) and node.msg is None]
    assert not bare, f"{path}: {bare}"
