"""`mstpass plan`: a function in a process of its own, and how far a plan is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from mstpass.cli.plan import _progress
from mstpass.errors import UserError
from mstpass.planner.background import background, usable_cores
from tests import planner_models


def test_a_result_comes_back():
    with background(planner_models.squared, (7,), "squares") as result:
        assert result() == 49


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (planner_models.refuse, UserError, "^3 is refused$"),
        (planner_models.divide_by_zero, ZeroDivisionError, "zero"),
        (planner_models.end_at_once, UserError, "that squares has ended"),
    ],
)
def test_errors_come_back(function, error, message):
    with (
        background(function, (3,), "squares") as result,
        pytest.raises(error, match=message),
    ):
        result()


def test_the_process_ends_with_the_block_and_not_by_an_interrupt():
    start = time.monotonic()
    with background(planner_models.sleep_long, (600,), "sleeps"):
        (process,) = multiprocessing.active_children()
        os.kill(process.pid, signal.SIGINT)
        process.join(0.3)
        assert process.is_alive()
    assert time.monotonic() - start < 60
    assert not process.is_alive()


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
