"""Part `tests`: the tests that are marked ``cuda``, file by file: all that need a CUDA device.

Those of ``tests/cuda`` come first, then the other files that test on every device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mstpass.bench.gpu.job import Job, outcome
from mstpass.bench.gpu.state import DRY, FAILED, MEASURED, SKIPPED, Case, Outcome, Settings
from mstpass.bench.processes import ROOT

NAME = "tests"
FOLDER, CUDA_FOLDER = "tests", "cuda"
_NONE = "no files"  # the row where there are no tests
_NO_TESTS = 5  # pytest's exit status
_LIMIT_S = 240.0
_ON_DEVICES = re.compile(r"def test_\w+\([^)]*\bdevice\b|mark\.cuda\b")
_PROCESSES = 4  # most of a test is compilation
_SHOWN = 5  # failed tests that a row names


def cases(settings: Settings) -> list[Case]:
    names = tuple(str(path.relative_to(ROOT / FOLDER)) for path in _files()) or (_NONE,)
    return [Case(NAME, FOLDER, names, _LIMIT_S)]


def work(job: Job) -> Outcome:
    if job.row == _NONE:
        return outcome(SKIPPED, f"no {FOLDER} beside the package: install from a checkout")
    if not job.device.runs:
        return outcome(DRY, f"pytest -m cuda {FOLDER}/{job.row}")
    if find_spec("pytest") is None:
        return outcome(SKIPPED, "pytest is not installed")
    return _run(job.row)


def _files() -> list[Path]:
    folder = ROOT / FOLDER
    own = sorted((folder / CUDA_FOLDER).glob("test_*.py"))
    others = (p for p in folder.glob("test_*.py") if _ON_DEVICES.search(p.read_text("utf-8")))
    return [*own, *sorted(others)]


def _run(row: str) -> Outcome:
    """Run one file's tests."""
    with tempfile.TemporaryDirectory(prefix="mstpass-gpu-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"),
            *("-p", "no:benchmark"),  # it warns about xdist, and here warnings are errors
            *(["-n", str(_PROCESSES)] if find_spec("xdist") is not None else []),
            *(f"--junitxml={report}", f"{FOLDER}/{row}"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        last = lines[-1] if lines else done.stderr.strip()[-200:]
        if done.returncode == _NO_TESTS:
            return outcome(SKIPPED, "no test is marked cuda")
        if not report.exists():
            return outcome(FAILED, last)
        counts = read_report(report.read_text(encoding="utf-8"))
        status = MEASURED if counts["passed"] and not counts["failed"] else FAILED
        return outcome(status, ", ".join(counts["names"][:_SHOWN]), **counts)


def read_report(text: str) -> dict[str, Any]:
    """Counts of a JUnit report, and the names of the tests that failed."""
    cases = list(ElementTree.fromstring(text).iter("testcase"))

    def having(*tags: str) -> list[str]:
        return [
            case.get("name", "") for case in cases if any(case.find(t) is not None for t in tags)
        ]

    failed, skipped = having("failure", "error"), having("skipped")
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "names": failed,
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
    }
