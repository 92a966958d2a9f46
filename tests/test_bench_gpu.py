"""`mstpass bench gpu` without a GPU: what a call keeps, whatever happens to its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mstpass.bench import processes
from mstpass.bench.gpu import command, device, heads
from mstpass.bench.gpu.runner import PARTS, Part, Runner, in_process
from mstpass.bench.gpu.state import (
    DRY,
    FAILED,
    FILE,
    MEASURED,
    OUT_OF_TIME,
    TOO_LONG,
    Case,
    OtherState,
    Settings,
    State,
    outcome,
)
from mstpass.bench.processes import ProcessFailed
from mstpass.cli.main import main
from tests.gpu_bench import Calls, Clock, Hang

ROWS = ("a", "b", "c")
CASE = Case("fake", "N=1", ROWS, limit_s=30.0)
HEADER = {"card": "NVIDIA H200", "torch": "2.11", "quick": False, "dry": False}


def measures(given):
    """A process that measures what it is given."""
    return outcome(MEASURED)


class Setup:
    """A runner of one part with one case, whose processes do what a test says."""

    def __init__(self, folder, work, case=CASE):
        self.clock = Clock()
        self.calls = Calls(work, self.clock)
        self.state = State.open(folder, HEADER)
        self.state.begin_run({"date": "today"})
        self.case = case
        self._parts = [Part("fake", "", 1, lambda settings: [case], work)]
        self._runner = Runner(Settings(folder), self.state, self.calls, clock=self.clock)

    def run(self, seconds=600.0):
        self._runner.run(self._parts, seconds)
        return self.statuses()

    def statuses(self):
        return {row: (self.state.outcome(self.case, row) or {}).get("status") for row in ROWS}

    def text(self, row):
        return self.state.outcome(self.case, row)["text"]


# ---- what happens to processes -----------------------------------------------------------------
def rows_of(calls):
    return [given["row"] for given in calls.given]


def test_a_process_for_each_row(tmp_path):
    setup = Setup(tmp_path, measures)
    assert setup.run() == dict.fromkeys(ROWS, MEASURED)
    assert rows_of(setup.calls) == list(ROWS)
    assert list(setup.calls.given[2]["known"]) == ["a", "b"]


def test_a_second_call_goes_on_with_what_is_missing(tmp_path):
    def two_rows(given):
        if given["row"] == "c":
            raise KeyboardInterrupt
        return outcome(FAILED if given["row"] == "b" else MEASURED)

    first = Setup(tmp_path, two_rows)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Setup(tmp_path, measures)
    assert second.statuses() == {"a": MEASURED, "b": FAILED, "c": None}
    assert second.run()["c"] == MEASURED
    (given,) = second.calls.given
    assert given["row"] == "c" and set(given["known"]) == {"a", "b"}
    assert [second.state.outcome(CASE, row)["run"] for row in ROWS] == [0, 0, 1]
    third = Setup(tmp_path, measures)
    third.run()
    assert third.calls.given == []


def test_a_process_that_dies_loses_one_row(tmp_path):
    def work(given):
        if given["row"] == "b":
            raise ProcessFailed("a row", "noise\nRuntimeError: no\n")
        return outcome(MEASURED)

    setup = Setup(tmp_path, work)
    assert setup.run() == {"a": MEASURED, "b": FAILED, "c": MEASURED}
    assert setup.text("b") == "RuntimeError: no"


def test_a_row_that_takes_too_long(tmp_path):
    def work(given):
        if given["row"] == "a":
            raise Hang
        return outcome(MEASURED)

    setup = Setup(tmp_path, work)
    assert setup.run() == {"a": TOO_LONG, "b": MEASURED, "c": MEASURED}
    assert setup.text("a") == "more than 30 s"


def test_the_time_is_over(tmp_path):
    def work(given):
        if given["row"] == "b":
            raise Hang
        return outcome(MEASURED)

    case = Case("fake", "N=1", ROWS, limit_s=900.0)
    setup = Setup(tmp_path, work, case)
    assert setup.run(seconds=100) == {"a": MEASURED, "b": OUT_OF_TIME, "c": OUT_OF_TIME}
    assert setup.clock.now <= 101
    later = Setup(tmp_path, measures, case)
    assert later.run() == dict.fromkeys(ROWS, MEASURED)


def test_no_row_is_begun_after_a_parts_share(tmp_path):
    clock = Clock()

    def slow(given):
        clock.now += 40
        return outcome(MEASURED)

    state = State.open(tmp_path, HEADER)
    state.begin_run({})
    cases = [Case(name, "N=1", ROWS, limit_s=60.0) for name in ("first", "second")]
    parts = [Part(c.part, "", 1, lambda _, c=c: [c], slow) for c in cases]
    Runner(Settings(tmp_path), state, Calls(slow, clock), clock=clock).run(parts, 160)
    first, second = ([state.outcome(c, r)["status"] for r in ROWS] for c in cases)
    # 80 s are the first part's: its second row ends at 82 s; 78 s are left
    assert first == second == [MEASURED, MEASURED, OUT_OF_TIME]


# ---- the state file ----------------------------------------------------------------------------
def test_a_line_that_was_not_finished_is_dropped(tmp_path):
    Setup(tmp_path, measures).run()
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-20])
    again = Setup(tmp_path, measures)
    assert again.statuses() == {"a": MEASURED, "b": MEASURED, "c": None}
    assert again.run()["c"] == MEASURED
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_rows_of_another_card_are_not_mixed(tmp_path):
    Setup(tmp_path, measures).run()
    with pytest.raises(OtherState, match="card=NVIDIA H200, and this call has card=NVIDIA A100"):
        State.open(tmp_path, {**HEADER, "card": "NVIDIA A100"})
    with pytest.raises(OtherState, match="nothing has been measured"):
        State.read(tmp_path / "elsewhere")
    (tmp_path / FILE).write_text('{"a": 1}\n')
    with pytest.raises(OtherState, match="not a state file"):
        State.read(tmp_path)


# ---- a real process ----------------------------------------------------------------------------
def test_a_real_process_measures_a_row(tmp_path):
    settings = {**vars(Settings(tmp_path, quick=True, dry=True)), "out": str(tmp_path)}
    case = dataclasses.asdict(heads.loop_cases(Settings(tmp_path, dry=True))[0])
    given = {"settings": settings, "case": case, "row": "calibration", "known": {}}
    assert in_process(given, {}, 300)["status"] == DRY


def starts_a_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_a_real_process_is_ended_with_its_children():
    (pid,) = processes.call("x", starts_a_child, {})
    status = Path("/proc", str(pid), "status")
    end = time.monotonic() + 30  # a killed process takes its time to go
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.05)


def test_a_process_that_takes_too_long():
    with pytest.raises(processes.TimedOut, match="more than 0 s"):
        processes.call("x", starts_a_child, {}, timeout_s=0.5)


def test_a_process_finds_this_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    root = str(Path(processes.__file__).parents[2])
    assert processes.with_package({"PYTHONPATH": "x"})["PYTHONPATH"].split(":") == [root, "x"]


# ---- the command -------------------------------------------------------------------------------
def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    said = capsys.readouterr().err
    assert "torch sees no CUDA device" in said and "--dry-run" in said
    assert all(part.what in said for part in PARTS.values())


@pytest.mark.parametrize(
    ("capability", "triton", "message"),
    [
        ((7, 5), True, "Tesla T4 has compute capability 7.5; .*bfloat16.* 8.0"),
        ((9, 0), False, "triton is not installed"),
        ((9, 0), True, None),
    ],
)
def test_machines_that_will_not_do(monkeypatch, capability, triton, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(device, "find_spec", lambda name: triton or None)
    if message is None:
        device.check_machine("all")
        return
    with pytest.raises(device.CannotRun, match=message):
        device.check_machine("all")


@pytest.mark.parametrize("argv", [["--part", "nonsense"], ["--minutes", "0"], ["--minutes", "x"]])
def test_called_wrongly(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert argv[1] in capsys.readouterr().err


def test_a_call_from_its_arguments_to_its_files(tmp_path, monkeypatch, capsys):
    clock = Clock()
    argv = ["--dry-run", "--quick", "--part", "heads", "--out", str(tmp_path)]
    monkeypatch.setattr(command, "RESULTS", tmp_path / "none")
    assert command.main(argv, Calls(interrupted_after_two, clock)) == command.INTERRUPTED
    rows = State.read(tmp_path).rows.values()
    assert [row["row"] for row in rows] == ["Inductor", "mst"]
    calls = Calls(plans, clock)
    assert command.main([*argv, "--minutes", "0.1"], calls) == command.ROWS_LEFT
    assert command.main(argv, calls) == command.DONE
    assert "not run" not in (tmp_path / "gpu.md").read_text()
    assert "heads, N=2048, eager: dry" in capsys.readouterr().out
    (tmp_path / "gpu.md").unlink()
    assert command.main(["--tables", "--out", str(tmp_path)]) == command.DONE
    assert "| eager |" in (tmp_path / "gpu.md").read_text()


def test_ended_by_a_signal(tmp_path):
    def killed(given):
        if given["known"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return outcome(DRY)

    before = signal.getsignal(signal.SIGTERM)
    argv = ["--dry-run", "--part", "heads", "--out", str(tmp_path)]
    assert command.main(argv, Calls(killed, Clock())) == command.INTERRUPTED
    assert len(State.read(tmp_path).rows) == 1
    assert signal.getsignal(signal.SIGTERM) == before


def plans(given):
    return outcome(DRY)


def interrupted_after_two(given):
    if len(given["known"]) == 2:
        raise KeyboardInterrupt
    return outcome(DRY)
