"""`mstpass plan`: a function in a process of its own, and how far a plan is."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mstpass.cli.plan import _progress
from mstpass.errors import UserError
from mstpass.planner.background import Background, usable_cores
from mstpass.planner.request import Request, Steps, pieces, silent
from mstpass.planner.training import Training
from tests import planner_models


def test_a_result_and_reports_come_back():
    reports = []
    collect = lambda *given: reports.append(given)
    with Background(planner_models.squared, (7,), collect, "squares") as background:
        assert background.result() == 49
    assert reports == [("squaring", 0.5, "half way")]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (planner_models.refuse, UserError, "^3 is refused$"),
        (planner_models.divide_by_zero, RuntimeError, "ZeroDivisionError"),
        (planner_models.end_at_once, UserError, "that squares has ended .exit code 3"),
    ],
)
def test_errors_come_back(function, error, message):
    background = Background(function, (3,), silent, "squares")
    with background, pytest.raises(error, match=message):
        background.result()


def test_the_process_ends_with_the_block_and_not_by_an_interrupt():
    started = threading.Event()
    start = time.monotonic()
    report = lambda *_: started.set()
    with Background(planner_models.sleep_long, (600,), report, "sleeps") as background:
        assert started.wait(60)
        os.kill(background._process.pid, signal.SIGINT)
        background._process.join(0.3)
        assert background._process.is_alive()
    assert time.monotonic() - start < 60
    assert not background._process.is_alive()


def test_there_is_a_core():
    assert usable_cores() >= 1


# ---- progress ----------------------------------------------------------------------------------
def test_pieces_are_all_of_the_work():
    for request in (_request(), _request(alone=True), _request(length=512)):
        assert sum(pieces(request).values()) == pytest.approx(1)
    assert "eager" not in pieces(_request(alone=True))
    assert "search" not in pieces(_request(length=512))


def test_steps_never_go_back_or_beyond_the_end():
    reports = []
    steps = Steps(lambda *given: reports.append(given), "search", expected=2)
    for number in range(5):
        steps.begin(str(number))
    steps.end()
    shares = [done for _, done, _ in reports]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-2] < shares[-1] == 1


def test_the_bar_moves(monkeypatch):
    progress = pytest.importorskip("rich.progress")
    bar = progress.Progress(disable=True)
    monkeypatch.setattr("mstpass.cli.plan.progress_bar", lambda *_, **__: bar)
    with _progress({"eager": 0.25, "mst": 0.75}) as report:
        report("mst", 0.5, "tracing")
        report("eager", 1.0, "")
        assert bar.tasks[0].percentage == pytest.approx(62.5)


def test_no_bar_without_a_terminal(capsys):
    pytest.importorskip("rich")
    with _progress({"mst": 1.0}) as report:
        report("mst", 0.5, "tracing")
    shown = capsys.readouterr()
    assert not shown.err and not shown.out


def _request(**rest):
    return Request("tiny", Training(), 2**30, 0, **rest)
