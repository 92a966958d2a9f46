"""The command: checks the machine, measures what is missing, and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from mstpass.bench.gpu import arguments, chunks, environment, results
from mstpass.bench.gpu.arguments import Arguments
from mstpass.bench.gpu.parts import PARTS
from mstpass.bench.gpu.process import WorkerProcess
from mstpass.bench.gpu.rows import MEASURED, OUT_OF_TIME, Case, Outcome
from mstpass.bench.gpu.runner import Launch, Runner
from mstpass.bench.gpu.state import State
from mstpass.bench.gpu.tables import outcome_text
from mstpass.bench.harness import Progress

_GIB = 2**30
_USABLE = 0.9  # of a card's memory: the rest is CUDA's context, and what others hold
DONE, BAD_INPUT, ROWS_LEFT, INTERRUPTED = 0, 2, 3, 130


def main(argv: Sequence[str] = (), launch: Launch = WorkerProcess) -> int:
    """Run `mstpass bench gpu`.

    Args:
        launch: starts a worker.
    """
    given = arguments.parse(argv)
    if given.tables:
        _write(given, State.read(given.settings.out))
        return DONE
    if not given.settings.dry:
        try:
            environment.check_machine(", ".join(PARTS[name].what for name in given.parts))
        except environment.CannotRun as error:
            print(f"mstpass bench gpu: {error}", file=sys.stderr)
            return BAD_INPUT
    card = environment.card()
    given = within_card(given, card.get("memory_bytes"))
    sizes = {"quick": given.settings.quick, "dry": given.settings.dry}
    state = State.open(given.settings.out, {**card, **sizes})
    state.begin_run(environment.facts())
    interrupted = False
    try:
        with _ended_like_interrupted():
            _measure(given, state, launch)
    except KeyboardInterrupt:
        interrupted = True
        print("\nmstpass bench gpu: interrupted; finished rows are kept", file=sys.stderr)
    _write(given, state)
    if interrupted:
        return INTERRUPTED
    return ROWS_LEFT if results.left_over(state) else DONE


def within_card(given: Arguments, card_bytes: int | None) -> Arguments:
    """The arguments with a memory limit, in whole GiB, that the card has room for."""
    if card_bytes is None or given.settings.memory_bytes <= _USABLE * card_bytes:
        return given
    limit = max(_GIB, int(_USABLE * card_bytes) // _GIB * _GIB)
    settings = dataclasses.replace(given.settings, memory_bytes=limit)
    return dataclasses.replace(given, settings=settings)


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """In here a SIGTERM, as of ``timeout``, ends the workers and keeps all rows, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(given: Arguments, state: State, launch: Launch) -> None:
    parts = [PARTS[name] for name in given.parts]
    cases = [case for part in parts for case in part.cases(given.settings)]
    left = sum(len(state.missing(case)) for case in cases)
    path = chunks.costs_path(given.settings.out)
    start = time.monotonic()
    with _Shown(left, start) as show:
        runner = Runner(
            given.settings, state, launch, show, environment={chunks.COSTS_VARIABLE: str(path)}
        )
        runner.run(parts, given.seconds)
    _store_costs(given, state)


def _store_costs(given: Arguments, state: State) -> None:
    """Keep what chunks cost for later compilations on this device, if this call has measured it."""
    case = chunks.cases(given.settings)[0]
    outcome = state.outcome(case, case.rows[0]) or {}
    this_call = outcome.get("run") == len(state.runs) - 1
    if outcome.get("status") == MEASURED and this_call and not given.settings.quick:
        path = chunks.store_for_later(given.settings.out)
        print(f"what chunks cost here is stored in {path}, for later compilations")


def _write(given: Arguments, state: State) -> None:
    for path in results.write(state, given.settings.out, published=given.is_published):
        print(f"written: {path}")
    left = results.left_over(state)
    if left:
        print(f"{left} rows were not run for lack of time: the same command goes on with them")


class _Shown:
    """Shows rows as they are finished: a line each, and on a terminal a progress bar below."""

    def __init__(self, total: int, start: float):
        self._start = start
        has_bar = sys.stdout.isatty() and find_spec("rich") is not None
        self._bar = Progress("gpu", total) if has_bar else None

    def __enter__(self) -> _Shown:
        self._advance = self._bar.__enter__() if self._bar else lambda what: None
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.__exit__(*exception)

    def __call__(self, case: Case, row: str, outcome: Outcome) -> None:
        if outcome["status"] != OUT_OF_TIME:
            seconds = time.monotonic() - self._start
            text = outcome_text(outcome)
            print(f"{seconds:5.0f} s  {case.part}, {case.name}, {row}: {text}", flush=True)
        self._advance(f"{case.part}, {row}")
