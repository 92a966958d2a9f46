"""Of which files a run imports the tests, by its marks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_ignore_collect


@pytest.mark.parametrize(
    ("marks", "left_out"),
    [
        ("lab and not dry_run", {"test_losses.py"}),
        ("not lab and not dry_run", {"test_fuzz.py"}),
        ("not dry_run", set()),
        ("", set()),
    ],
)
def test_files_that_are_left_out(marks: str, left_out: set[str]) -> None:
    config: Any = SimpleNamespace(getoption=lambda name: marks)
    paths = [Path(__file__).with_name(name) for name in ("test_losses.py", "test_fuzz.py")]
    assert {path.name for path in paths if pytest_ignore_collect(path, config)} == left_out
