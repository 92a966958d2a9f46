"""Ctrl-C, no memory, no disk, a home that cannot be written, workers: in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_cases import CASES

ROOT = Path(__file__).parents[1]


FULL = ("interrupted_at_any_time", "workers_that_are_spawned")
NAMES = [pytest.param(n, marks=[pytest.mark.full] if n in FULL else []) for n in CASES]


@pytest.fixture(scope="module")
def failed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str | None]:
    """All cases, one after the other in one process: the traceback of each, None if it passed."""
    names = [name for name in CASES if name not in FULL or request.config.getoption("--all")]
    folder = tmp_path_factory.mktemp("faults")
    environ = {**os.environ, "MSTPASS_COSTS": str(folder / "costs.json")}
    environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # what is freed is gone
    command = [sys.executable, "-m", "tests.fault_cases", str(folder / "result.json"), *names]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((folder / "result.json").read_text())
    assert list(result["seconds"]) == names, "the process ended early"
    return {name: result["failed"].get(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_of_a_process(name: str, failed: dict[str, str | None]) -> None:
    assert failed[name] is None, failed[name]
