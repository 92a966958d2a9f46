"""Runs the cases of a call within its time: a process for each row, and deadlines.

Nothing that a process does ends the run. A row whose process dies, hangs or runs out of memory has
that as its outcome. When the time is over, the rows that are left are written down as not run; a
later call tries them again.

The parts of the benchmark, in the order in which they run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mstpass.bench import processes
from mstpass.bench.gpu import heads, llama
from mstpass.bench.gpu.device import Device, NoDevice
from mstpass.bench.gpu.state import (
    FAILED,
    OUT_OF_TIME,
    TOO_LONG,
    Case,
    Job,
    Outcome,
    Settings,
    State,
    outcome,
)
from mstpass.bench.processes import ProcessFailed, TimedOut


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        what: what it measures, in words.
        share: its part of a call's time; what it does not use is left to the parts after it.
        cases: its cases.
        work: measures a row, in a new process.
    """

    name: str
    what: str
    share: float
    cases: Callable[[Settings], Sequence[Case]]
    work: Callable[[Job], Outcome]


_ALL = (
    Part(heads.LOOPS, "loops and what their chunks cost", 2, heads.loop_cases, heads.loop_work),
    Part(heads.NAME, "LM heads at Llama-3 sizes", 3, heads.cases, heads.work),
    Part(llama.NAME, "Llama-3-8B-shaped blocks by budget", 3, llama.cases, llama.work),
)
PARTS: Mapping[str, Part] = {part.name: part for part in _ALL}


# ---- the runner ----------------------------------------------------------------------------------
LEAST_S = 20.0  # with less time than this left, no process is started

Given = Mapping[str, Any]
Call = Callable[[Given, Mapping[str, str], float], Mapping[str, Any]]  # variables, most seconds
OnRow = Callable[[Case, str, Outcome], None]


def in_process(given: Given, variables: Mapping[str, str], limit_s: float) -> Mapping[str, Any]:
    """What `attempt` returns in a new process.

    Raises:
        ProcessFailed: it failed, or took too long.
    """
    (found,) = processes.call("a row", attempt, given, environment=variables, timeout_s=limit_s)
    return found


def attempt(
    settings: Given, case: Given, device: Device | None = None, **more: Any
) -> Mapping[str, Any]:
    """The outcome of a row; this runs in the new process."""
    device = device or (NoDevice() if settings["dry"] else Device())
    chosen = Settings(**{**settings, "out": Path(settings["out"])})
    own = Case(**{**case, "rows": tuple(case["rows"])})
    return PARTS[own.part].work(Job(chosen, own, device=device, **more))


class Runner:
    """Measures the missing rows of parts.

    Args:
        call: measures in a new process.
        on_row: called with each outcome, once it is kept.
        environment: variables of all processes.
        clock: the time in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        state: State,
        call: Call = in_process,
        on_row: OnRow = lambda case, row, outcome: None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings, self._state, self._call = settings, state, call
        self._on_row, self._environment, self._clock = on_row, environment or {}, clock

    def run(self, parts: Sequence[Part], seconds: float) -> None:
        """Measure what is missing within ``seconds``, shared among the parts."""
        end = self._clock() + seconds
        work = [(part, self._unfinished(part)) for part in parts]
        open_parts = [(part, cases) for part, cases in work if cases]
        for number, (part, cases) in enumerate(open_parts):
            left = end - self._clock()
            shares = sum(other.share for other, _ in open_parts[number:])
            deadline = self._clock() + left * part.share / shares
            for case in cases:
                for row in self._state.missing(case):
                    self._measure(case, row, deadline, end)

    def _unfinished(self, part: Part) -> list[Case]:
        return [case for case in part.cases(self._settings) if self._state.missing(case)]

    def _measure(self, case: Case, row: str, deadline: float, end: float) -> None:
        """Measure a row.

        None is begun after the part's ``deadline``; one that has begun may run until the ``end``.
        """
        left = end - self._clock()
        if deadline - self._clock() < LEAST_S:
            return self._keep(case, row, outcome(OUT_OF_TIME))
        data = {**dataclasses.asdict(self._settings), "out": str(self._settings.out)}
        given = {"settings": data, "case": dataclasses.asdict(case), "row": row}
        known = {"known": self._state.known(case)}
        try:
            found = self._call({**given, **known}, self._environment, min(case.limit_s, left))
        except ProcessFailed as error:
            if isinstance(error, TimedOut) and left <= case.limit_s:
                return self._keep(case, row, outcome(OUT_OF_TIME))
            found = outcome(TOO_LONG if isinstance(error, TimedOut) else FAILED, error.why)
        return self._keep(case, row, found)

    def _keep(self, case: Case, row: str, found: Outcome) -> None:
        self._state.add(case, row, found)
        self._on_row(case, row, found)
