"""Run many cases in worker processes, and keep every result as soon as it is known.

Results are lines of JSON in one file for each kind and seed. A campaign that is started again goes
on behind the cases that the file has.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Result = dict[str, Any]
_CASES_OF_A_WORKER = 200  # Dynamo and AOTAutograd keep something of every compilation
_REDUCING_S, _LEAVING_S = 1800.0, 10.0


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
        left: Iterator[int] = (number for number in numbers if number not in known)
        lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        left_open = self.results_file.exists() and not self.results_file.read_bytes().endswith(
            b"\n"
        )
        with self.results_file.open("a", encoding="utf-8") as file:
            if left_open:
                file.write("\n")

            def take() -> int | None:
                with lock:
                    return next(left, None)

            def keep(result: Result) -> None:
                with lock:
                    file.write(json.dumps(result) + "\n")
                    file.flush()
                    done(result)

            with ThreadPoolExecutor(jobs) as pool:
                try:
                    for finished in [pool.submit(self._drive, take, keep) for _ in range(jobs)]:
                        finished.result()
                except BaseException:
                    with lock:
                        left = iter(())
                    raise

    def reduced(self, number: int) -> Result:
        """The smallest case that fails as this one does, and its test; kept in a file as well."""
        with _Worker(self.kind, self.seed) as worker:
            answer = worker.ask("reduce", number, _REDUCING_S)
        if "test" in answer:
            path = self.folder / f"{self.kind}-{self.seed}-{number}.py"
            path.write_text(answer["test"], encoding="utf-8")
        return answer

    def _drive(self, take: Callable[[], int | None], keep: Callable[[Result], None]) -> None:
        """Give one worker after the other cases to run, until none is left."""
        for first in iter(take, None):
            batch = itertools.islice(iter(take, None), _CASES_OF_A_WORKER - 1)
            with _Worker(self.kind, self.seed) as worker:
                for number in itertools.chain((first,), batch):
                    answer = worker.ask("check", number, self.case_s)
                    keep({"number": number, **answer})
                    if not worker.alive:
                        break


def _serve(*given: Any) -> None:
    from mstpass.fuzz.worker import serve  # it imports torch, which takes seconds

    serve(*given)


class _Worker:
    """A process of worker.py."""

    def __init__(self, kind: str, seed: int):
        # Torch's partitioner writes a file where a cut fails.
        self._scratch = tempfile.TemporaryDirectory(prefix="mstpass-fuzz-")
        spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
        self._answers, given = spawn.Pipe()
        args = given, kind, seed, self._scratch.name
        self._process = spawn.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        given.close()
        self.alive = True

    def ask(self, command: str, number: int, limit_s: float) -> Result:
        """The answer; a failure if the process ends or takes too long, and then it is ended."""
        failure = {"kind": "hung", "text": f"took more than {limit_s:.0f} s"}
        try:
            self._answers.send((command, number))
            if self._answers.poll(limit_s):
                answer: Result = self._answers.recv()
                return answer
        except (EOFError, OSError):
            self._process.join()
            failure = {"kind": "died", "text": f"ended the process ({self._process.exitcode})"}
        self._process.kill()
        self.alive = False
        return {"status": "failed", "failures": [failure]}

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()  # one that waits for a request ends then
        self._process.join(_LEAVING_S)
        self._process.kill()
        self._scratch.cleanup()
