"""Run many cases in worker processes, and keep every result as soon as it is known.

Results are lines of JSON in one file for each kind and seed. A campaign that is started again goes
on behind the cases that the file has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Result = dict[str, Any]
_CASES_OF_A_WORKER = 200  # Dynamo and AOTAutograd keep something of every compilation
_REDUCING_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Campaign:
    """Which cases to run.

    Attributes:
        kind: "fast" or "inductor".
        folder: where results are written.
        case_s: a case that takes longer has failed.
    """

    kind: str
    seed: int
    folder: Path
    case_s: float = 120.0

    @property
    def results_file(self) -> Path:
        return self.folder / f"{self.kind}-{self.seed}.jsonl"

    def known(self) -> dict[int, Result]:
        """The results of earlier runs, by the number of the case; a line cut short is left out."""
        if not self.results_file.exists():
            return {}
        found = {}
        for line in self.results_file.read_text(encoding="utf-8").splitlines():
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[result["number"]] = result
        return found

    def run(self, numbers: Iterable[int], jobs: int, done: Callable[[Result], None]) -> None:
        """Run the cases that have no result yet; ``done`` gets each result, one at a time."""
        known = self.known()
        left = _Shared(number for number in numbers if number not in known)
        lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        left_open = self.results_file.exists() and not self.results_file.read_bytes().endswith(
            b"\n"
        )
        with self.results_file.open("a", encoding="utf-8") as file:
            if left_open:
                file.write("\n")

            def keep(result: Result) -> None:
                with lock:
                    file.write(json.dumps(result) + "\n")
                    file.flush()
                    done(result)

            with ThreadPoolExecutor(jobs) as pool:
                try:
                    for finished in [pool.submit(self._drive, left, keep) for _ in range(jobs)]:
                        finished.result()
                except BaseException:
                    left.close()
                    raise

    def reduced(self, number: int) -> Result:
        """The smallest case that fails as this one does, and its test; kept in a file as well."""
        with _Worker(self.kind, self.seed) as worker:
            answer = worker.ask(f"reduce {number}", _REDUCING_S)
        if "test" in answer:
            path = self.folder / f"{self.kind}-{self.seed}-{number}.py"
            path.write_text(answer["test"], encoding="utf-8")
        return answer

    def _drive(self, numbers: Iterator[int], keep: Callable[[Result], None]) -> None:
        """Give one worker after the other cases to run, until none is left."""
        for number in numbers:
            batch = itertools.islice(numbers, _CASES_OF_A_WORKER - 1)
            with _Worker(self.kind, self.seed) as worker:
                for next_number in itertools.chain((number,), batch):
                    answer = worker.ask(f"check {next_number}", self.case_s)
                    keep({"number": next_number, **answer})
                    if not worker.alive:
                        break


class _Shared:
    """An iterator that several threads may read, and one may close."""

    def __init__(self, values: Iterable[int]):
        self._values, self._lock = iter(values), threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._values)

    def close(self) -> None:
        with self._lock:
            self._values = iter(())


class _Worker:
    """A process of worker.py."""

    def __init__(self, kind: str, seed: int):
        # Torch's partitioner writes a file where a cut fails.
        self._scratch = tempfile.TemporaryDirectory(prefix="mstpass-fuzz-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mstpass.fuzz.worker", kind, str(seed)],
            cwd=self._scratch.name,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # an interrupt is the campaign's to handle
        )
        self.alive = True

    def ask(self, request: str, limit_s: float) -> Result:
        """The answer; a failure if the process ends or takes too long, and then it is ended."""
        assert self._process.stdin is not None and self._process.stdout is not None, (
            "both are pipes"
        )
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
            line = self._process.stdout.readline() if ready else ""
        except BrokenPipeError:
            ready, line = [self._process.stdout], ""
        if line:
            return json.loads(line)
        self._end()
        failure = {"kind": "hung", "text": f"took more than {limit_s:.0f} s"}
        if ready:
            failure = {"kind": "died", "text": f"ended the process ({self._process.returncode})"}
        return {"status": "failed", "failures": [failure]}

    def _end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._scratch.cleanup()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
