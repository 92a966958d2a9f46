"""Run the test files, each in a process of its own, and keep the results in a file.

The file has one JSON object in each line::

    {"file": ..., "backend": "mst", "collected": 120}
    {"file": ..., "backend": "mst", "start": "TestA::test_b"}
    {"file": ..., "backend": "mst", "test": "TestA::test_b", "outcome": "passed", "calls": 2, ...}
    {"file": ..., "backend": "mst", "finished": true, "error": ""}

``backend`` is ``mst``, or ``torch`` for the second run of tests that failed. A call reads the file
first and runs what is left. A process that dies or hangs has failed the test that it began last.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from tests.torch_suite.files import SuiteFile
from tests.torch_suite.plugin import VARIABLE

MST, TORCH = "mst", "torch"
_PROJECT = Path(__file__).parents[2]
_MORE_TIME_S = 180  # to import torch and to collect the tests
_POLL_S = 2


@dataclasses.dataclass
class Results:
    """What is known of one file under one backend.

    Attributes:
        tests: the outcomes by test.
        began: the test that began last.
        collected: how many tests pytest found; None before it has.
        error: why the file cannot be run; empty if it can.
    """

    tests: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    began: str = ""
    collected: int | None = None
    finished: bool = False
    error: str = ""


def read(path: Path) -> dict[tuple[str, str], Results]:
    """The results by file and backend."""
    found: dict[tuple[str, str], Results] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for row in map(json.loads, lines):
        results = found.setdefault((row["file"], row["backend"]), Results())
        if "test" in row:
            results.tests[row["test"]] = row
        results.began = row.get("start", results.began)
        results.collected = row.get("collected", results.collected)
        results.finished = row.get("finished", results.finished)
        results.error = row.get("error", results.error)
    return found


def failures(results: Results) -> list[str]:
    return [name for name, row in results.tests.items() if row["outcome"] == "failed"]


class Runner:
    """Runs files of one folder.

    Args:
        results: the file with the results.
        limit_s: the time of one test.
        until: ``time.monotonic()`` at which to stop; a later call goes on.
        most: the most tests of one file, the first ones; None for all.
    """

    def __init__(
        self, folder: Path, results: Path, limit_s: int, until: float, most: int | None = None
    ):
        self.folder, self.results = folder, results.resolve()
        self.limit_s, self.until, self.most = limit_s, until, most

    def run(self, files: Sequence[SuiteFile]) -> None:
        for file in files:
            self._run(file, MST, None)
            failed = failures(read(self.results).get((file.name, MST), Results()))
            if failed:
                self._run(file, TORCH, frozenset(failed))

    def _run(self, file: SuiteFile, backend: str, only: Set[str] | None) -> None:
        """Start processes until every test has an outcome, or the time is over."""
        while time.monotonic() < self.until:
            known = read(self.results).get((file.name, backend), Results())
            left = None if only is None else only - known.tests.keys()
            most = self.most - len(known.tests) if self.most is not None and only is None else None
            done = known.finished if left is None else not left
            if done or (most is not None and most < 1):
                return
            code, output = self._process(file, backend, known, left, most)
            after = read(self.results).get((file.name, backend), Results())
            row: dict[str, Any] = {"file": file.name, "backend": backend}
            if time.monotonic() > self.until:
                return
            if after.began not in {"", *after.tests}:
                reason = f"the process ended with {code}: {output[-600:]}"
                row.update(test=after.began, outcome="failed", reason=reason, calls=1, seconds=0)
                self._write(row)
            elif not after.collected:
                self._write({**row, "finished": True, "error": output[-3000:]})
                return
            elif len(after.tests) in (after.collected, len(known.tests)):  # none is left
                self._write({**row, "finished": True, "error": ""})
                return

    def _process(
        self,
        file: SuiteFile,
        backend: str,
        known: Results,
        only: Set[str] | None,
        most: int | None,
    ) -> tuple[int, str]:
        path = self.folder / file.path
        settings = {
            "file": file.name,
            "backend": backend,
            "results": str(self.results),
            "limit_s": self.limit_s,
            "done": sorted(known.tests),
            "only": None if only is None else sorted(only),
            "most": most,
            "on_cpu": file.on_cpu,
        }
        settings_file = self.results.with_suffix(".settings")
        settings_file.write_text(json.dumps(settings), encoding="utf-8")
        paths = (_PROJECT, self.folder, path.parent)
        environ = {
            **os.environ,
            VARIABLE: str(settings_file),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
        }
        command = [sys.executable, "-m", "pytest", str(path), "-q", "--noconftest"]
        command += ["-c", os.devnull, "--rootdir", str(path.parent)]
        command += ["-p", "no:cacheprovider", "-p", "tests.torch_suite.plugin"]
        command += ["-k", file.chosen] if file.chosen else []
        log = self.results.with_suffix(".log")
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                command, env=environ, cwd=path.parent, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
            code = self._wait(process)
        return code, log.read_text(encoding="utf-8", errors="replace")

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status; a process that writes no results for too long is ended."""
        started = time.time()
        while process.poll() is None:
            time.sleep(_POLL_S)
            written = self.results.stat().st_mtime if self.results.exists() else started
            silent_s = time.time() - max(started, written)
            if silent_s > self.limit_s + _MORE_TIME_S or time.monotonic() > self.until:
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def _write(self, row: dict[str, Any]) -> None:
        with self.results.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
