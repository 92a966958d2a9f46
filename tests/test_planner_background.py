"""`mstpass plan`: a function in a process of its own, and how far a plan is."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mstpass.cli.plan import _progress
from mstpass.errors import UserError
from mstpass.planner.background import Background, usable_cores
from tests import planner_models


def test_a_result_comes_back():
    with Background(planner_models.squared, (7,), "squares") as background:
        assert background.result() == 49


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (planner_models.refuse, UserError, "^3 is refused$"),
        (planner_models.divide_by_zero, RuntimeError, "ZeroDivisionError"),
        (planner_models.end_at_once, UserError, "that squares has ended .exit code 3"),
    ],
)
def test_errors_come_back(function, error, message):
    background = Background(function, (3,), "squares")
    with background, pytest.raises(error, match=message):
        background.result()


def test_the_process_ends_with_the_block_and_not_by_an_interrupt():
    start = time.monotonic()
    with Background(planner_models.sleep_long, (600,), "sleeps") as background:
        os.kill(background._process.pid, signal.SIGINT)
        background._process.join(0.3)
        assert background._process.is_alive()
    assert time.monotonic() - start < 60
    assert not background._process.is_alive()


def test_there_is_a_core():
    assert usable_cores() >= 1


# ---- progress ----------------------------------------------------------------------------------
def test_the_line_says_what_is_planned(monkeypatch):
    progress = pytest.importorskip("rich.progress")
    line = progress.Progress(disable=True)
    monkeypatch.setattr("mstpass.cli.plan.progress_bar", lambda *_, **__: line)
    with _progress() as report:
        report("mst: tracing")
        assert line.tasks[0].description == "mst: tracing"


def test_no_line_without_a_terminal(capsys):
    pytest.importorskip("rich")
    with _progress() as report:
        report("mst: tracing")
    shown = capsys.readouterr()
    assert not shown.err and not shown.out
