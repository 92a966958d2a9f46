"""Runs the cases of a call within its time: starts workers, keeps their events, sets deadlines.

Nothing that a worker does ends the run. A row whose process dies, hangs or runs out of memory has
that as its outcome, and a new process measures the rows after it. When the time is over, the rows
that are left are written down as not run; a later call tries them again.

The parts of the benchmark, in the order in which they run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mstpass.bench.gpu import cuda_tests, heads, llama, longest
from mstpass.bench.gpu.job import RESTART, Event, Job, WorkerProcess, job_data
from mstpass.bench.gpu.state import (
    FAILED,
    OUT_OF_TIME,
    TOO_LONG,
    Case,
    Outcome,
    Settings,
    State,
    is_final,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        what: what it measures, in words.
        share: its part of a call's time; what it does not use is left to the parts after it.
        cases: its cases.
        work: measures the wanted rows of a job, in a worker.
        environment: variables of its workers.
    """

    name: str
    what: str
    share: float
    cases: Callable[[Settings], Sequence[Case]]
    work: Callable[[Job], None]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ALL = (
    Part(cuda_tests.NAME, "the CUDA tests", 2, cuda_tests.cases, cuda_tests.work),
    Part(heads.LOOPS, "loops and what their chunks cost", 2, heads.loop_cases, heads.loop_work),
    Part(heads.NAME, "LM heads at Llama-3 sizes", 3, heads.cases, heads.work),
    Part(llama.NAME, "Llama-3-8B-shaped blocks by budget", 3, llama.cases, llama.work),
    Part(
        longest.NAME,
        "the longest sequence that fits",
        4,
        longest.cases,
        longest.work,
        # as `mstpass plan` assumes: no gaps between tensors
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
)
PARTS: Mapping[str, Part] = {part.name: part for part in _ALL}


# ---- the runner ----------------------------------------------------------------------------------
LEAST_S = 20.0  # with less time than this left, no process is started

Launch = Callable[[Mapping[str, Any], Mapping[str, str]], WorkerProcess]  # of a job and variables
OnRow = Callable[[Case, str, Outcome], None]


class Runner:
    """Measures the missing rows of parts.

    Args:
        launch: starts a worker.
        on_row: called with each outcome, once it is kept.
        environment: variables of all workers.
        clock: the time in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        state: State,
        launch: Launch,
        on_row: OnRow = lambda case, row, outcome: None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings, self._state, self._launch = settings, state, launch
        self._on_row, self._environment, self.clock = on_row, environment or {}, clock

    def run(self, parts: Sequence[Part], seconds: float) -> None:
        """Measure what is missing within ``seconds``, shared among the parts."""
        end = self.clock() + seconds
        work = [(part, self._unfinished(part)) for part in parts]
        open_parts = [(part, cases) for part, cases in work if cases]
        for number, (part, cases) in enumerate(open_parts):
            left = end - self.clock()
            shares = sum(other.share for other, _ in open_parts[number:])
            deadline = self.clock() + left * part.share / shares
            for case in cases:
                self._measure(part, case, deadline, end)

    def _unfinished(self, part: Part) -> list[Case]:
        return [case for case in part.cases(self._settings) if self._state.missing(case)]

    def _measure(self, part: Part, case: Case, deadline: float, end: float) -> None:
        """Measure a case, in as many processes as it takes.

        No row is begun after the part's ``deadline``; one that has begun may run until the ``end``.
        """
        while missing := self._state.missing(case):
            if deadline - self.clock() < LEAST_S:
                for row in missing:
                    self.keep(case, row, {"status": OUT_OF_TIME, "text": ""})
                return
            job = job_data(self._settings, case, tuple(missing), self._state.known(case))
            variables = {**self._environment, **part.environment}
            with self._launch(job, variables) as process:
                _Watch(self, case, missing, process).run(deadline, end)

    # ---- what a watch of one process calls -----------------------------------------------------
    def keep(self, case: Case, row: str, outcome: Outcome) -> None:
        self._state.add(case, row, outcome)
        self._on_row(case, row, outcome)

    def keep_probe(self, case: Case, row: str, probe: Mapping[str, Any]) -> None:
        self._state.add_probe(case, row, probe)


class _Watch:
    """Takes the events of one process until it ends or its time is over.

    At least one row is finished, or something found on the way to it, whatever the process does: so
    a case comes to its end.

    Attributes:
        _current: the row that is measured, or the first one while the process starts.
        _probe: what is tried on the way to its outcome, such as a length; empty if that is unknown.
    """

    def __init__(self, runner: Runner, case: Case, missing: Sequence[str], process: WorkerProcess):
        self._runner, self._case, self._process = runner, case, process
        self._left = list(missing)
        self._current = missing[0]
        self._probe: Mapping[str, Any] = {}
        self._limit = runner.clock() + case.limit_s
        self._progress = False

    def run(self, deadline: float, end: float) -> None:
        clock = self._runner.clock
        while True:
            try:
                event = self._process.next_event(min(self._limit, end) - clock())
            except TimeoutError:
                if end > self._limit:
                    self._too_long()
                return
            if event is None:
                self._ended()
                return
            self._take(event)
            if clock() >= deadline and event["event"] != "start":
                return

    def _take(self, event: Event) -> None:
        row = event["row"]
        if event["event"] == "start":
            self._current, self._probe = row, event["probe"]
        elif event["event"] == "probe":
            self._progress, self._probe = True, {}
            self._runner.keep_probe(self._case, row, event["probe"])
        else:
            self._keep(row, event["outcome"])
            self._current, self._probe = self._left[0] if self._left else row, {}
        self._limit = self._runner.clock() + self._case.limit_s

    def _too_long(self) -> None:
        limit = f"more than {self._case.limit_s:.0f} s"
        if self._probe:
            self._does_not_fit(limit)
        else:
            self._keep(self._current, {"status": TOO_LONG, "text": limit})

    def _ended(self) -> None:
        status = self._process.status()
        if not self._left or (status == RESTART and self._progress):
            return
        why = _reason(status, self._process.last_words())
        if self._probe:
            self._does_not_fit(why)
        elif status == 0:  # it had no more to do
            for row in list(self._left):
                self._keep(row, {"status": FAILED, "text": "its process measured nothing"})
        else:
            self._keep(self._current, {"status": FAILED, "text": why})

    def _does_not_fit(self, why: str) -> None:
        probe = {**self._probe, "fits": False, "why": why}
        self._runner.keep_probe(self._case, self._current, probe)

    def _keep(self, row: str, outcome: Outcome) -> None:
        self._progress = True
        if row in self._left and is_final(outcome):
            self._left.remove(row)
        self._runner.keep(self._case, row, outcome)


def _reason(status: int, last_words: str) -> str:
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"its process ended: {how}{': ' if last_words else ''}{last_words}"
