"""`mstpass bench gpu` without a GPU: what a call keeps, whatever happens to its workers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from mstpass.bench import processes
from mstpass.bench.gpu import command, device
from mstpass.bench.gpu.job import RESTART, WorkerProcess
from mstpass.bench.gpu.runner import PARTS, Part, Runner
from mstpass.bench.gpu.state import (
    DRY,
    FAILED,
    FILE,
    MEASURED,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    TOO_LONG,
    Case,
    OtherState,
    Settings,
    State,
)
from mstpass.cli.main import main
from tests.gpu_bench import Clock, Die, Hang, InProcess

ROWS = ("a", "b", "c")
CASE = Case("fake", "N=1", ROWS, limit_s=30.0)
HEADER = {"card": "NVIDIA H200", "torch": "2.11", "quick": False, "dry": False}


def begun(row, **probe):
    return {"event": "start", "row": row, "probe": probe}


def done(row, status=MEASURED, **figures):
    return {"event": "row", "row": row, "outcome": {"status": status, "text": "", **figures}}


def measures(data):
    """A worker that measures all that is wanted."""
    for row in data["wanted"]:
        yield begun(row)
        yield done(row)


class Setup:
    """A runner of one part with one case, whose workers do what a test says."""

    def __init__(self, folder, work, case=CASE):
        self.clock = Clock()
        self.process = InProcess(work, self.clock)
        self.state = State.open(folder, HEADER)
        self.state.begin_run({"date": "today"})
        self.case = case
        part = Part("fake", "", 1, lambda settings: [case], lambda job: None)
        settings = Settings(folder)
        self._runner = Runner(settings, self.state, self.process.launch, clock=self.clock)
        self._parts = [part]

    def run(self, seconds=600.0):
        self._runner.run(self._parts, seconds)
        return self.statuses()

    def statuses(self):
        return {row: (self.state.outcome(self.case, row) or {}).get("status") for row in ROWS}

    def text(self, row):
        return self.state.outcome(self.case, row)["text"]


# ---- what happens to workers -------------------------------------------------------------------
def test_all_rows_in_one_process(tmp_path):
    setup = Setup(tmp_path, measures)
    assert setup.run() == dict.fromkeys(ROWS, MEASURED)
    assert len(setup.process.jobs) == 1


def test_a_second_call_goes_on_with_what_is_missing(tmp_path):
    def two_rows(data):
        yield from (done("a"), done("b", FAILED), KeyboardInterrupt())

    first = Setup(tmp_path, two_rows)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Setup(tmp_path, measures)
    assert second.statuses() == {"a": MEASURED, "b": FAILED, "c": None}
    assert second.run()["c"] == MEASURED
    (job,) = second.process.jobs
    assert job["wanted"] == ["c"] and set(job["known"]["outcomes"]) == {"a", "b"}
    assert [second.state.outcome(CASE, row)["run"] for row in ROWS] == [0, 0, 1]
    third = Setup(tmp_path, measures)
    third.run()
    assert third.process.jobs == []


def test_out_of_memory_in_the_middle(tmp_path):
    def work(data):
        for row in data["wanted"]:
            yield begun(row)
            if row == "b":
                yield done(row, OUT_OF_MEMORY)
                yield Die(RESTART, "")
                return
            yield done(row)

    setup = Setup(tmp_path, work)
    assert setup.run() == {"a": MEASURED, "b": OUT_OF_MEMORY, "c": MEASURED}
    assert [job["wanted"] for job in setup.process.jobs] == [["a", "b", "c"], ["c"]]


def test_a_process_that_dies_loses_one_row(tmp_path):
    def work(data):
        for row in data["wanted"]:
            yield begun(row)
            yield Die(-9, "RuntimeError: no") if row == "b" else done(row)

    setup = Setup(tmp_path, work)
    assert setup.run() == {"a": MEASURED, "b": FAILED, "c": MEASURED}
    assert setup.text("b") == "its process ended: signal 9: RuntimeError: no"


@pytest.mark.parametrize("ends", [Die(1, "ImportError: torch"), Die(RESTART, ""), None])
def test_workers_that_measure_nothing_come_to_an_end(tmp_path, ends):
    setup = Setup(tmp_path, lambda data: iter([ends] if ends else []))
    assert setup.run() == dict.fromkeys(ROWS, FAILED)


def test_a_row_that_takes_too_long(tmp_path):
    def work(data):
        for row in data["wanted"]:
            yield begun(row)
            yield Hang() if row == "a" else done(row)

    setup = Setup(tmp_path, work)
    assert setup.run() == {"a": TOO_LONG, "b": MEASURED, "c": MEASURED}
    assert setup.text("a") == "more than 30 s"


def test_the_time_is_over(tmp_path):
    def work(data):
        yield begun("a")
        yield done("a")
        yield begun("b")
        yield Hang()

    case = Case("fake", "N=1", ROWS, limit_s=900.0)
    setup = Setup(tmp_path, work, case)
    assert setup.run(seconds=100) == {"a": MEASURED, "b": OUT_OF_TIME, "c": OUT_OF_TIME}
    assert setup.clock.now <= 101
    later = Setup(tmp_path, measures, case)
    assert later.run() == dict.fromkeys(ROWS, MEASURED)


def test_no_row_is_begun_after_a_parts_share(tmp_path):
    clock = Clock()
    process = InProcess(slow_rows(clock), clock)
    state = State.open(tmp_path, HEADER)
    state.begin_run({})
    cases = [Case(name, "N=1", ROWS, limit_s=60.0) for name in ("first", "second")]
    parts = [Part(c.part, "", 1, lambda _, c=c: [c], lambda job: None) for c in cases]
    Runner(Settings(tmp_path), state, process.launch, clock=clock).run(parts, 160)
    first, second = ([state.outcome(c, r)["status"] for r in ROWS] for c in cases)
    # 80 s are the first part's: its second row ends at 82 s; 78 s are left
    assert first == second == [MEASURED, MEASURED, OUT_OF_TIME]


def slow_rows(clock):
    def work(data):
        for row in data["wanted"]:
            yield begun(row)
            clock.now += 39
            yield done(row)

    return work


def test_a_probe_that_kills_its_process_does_not_fit(tmp_path):
    def work(data):
        probes = data["known"]["probes"]["a"]
        if not probes:
            yield begun("a", length=64)
            yield Die(-9, "")
            return
        assert [(p["length"], p["fits"]) for p in probes] == [(64, False)]
        yield from measures(data)

    setup = Setup(tmp_path, work)
    assert setup.run() == dict.fromkeys(ROWS, MEASURED)


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
def worker_process(program, job=None):
    return WorkerProcess(job or {}, {"NAME": "value"}, (sys.executable, "-c", program))


def test_a_real_process_sends_events():
    program = """
import json, os, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"row": job["row"], "text": os.environ["NAME"]}), flush=True)
print("noise", file=sys.stderr)
raise ValueError("the end")
"""
    with worker_process(program, {"row": "a"}) as worker:
        assert worker.next_event(60) == {"row": "a", "text": "value"}
        assert worker.next_event(60) is None
        assert worker.status() == 1
        assert worker.last_words() == "ValueError: the end"


def test_a_real_process_is_ended_with_its_children(tmp_path):
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("{{}}", flush=True)
time.sleep(600)
"""
    with worker_process(program) as worker:
        assert worker.next_event(60) == {}
        with pytest.raises(TimeoutError):
            worker.next_event(0.01)
    pid = (tmp_path / "pid").read_text()
    status = Path("/proc", pid, "status")
    end = time.monotonic() + 30  # a killed process takes its time to go
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.05)


def test_a_worker_finds_this_package(monkeypatch):
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


@pytest.mark.parametrize(
    "argv", [["--part", "nonsense"], ["--minutes", "0"], ["--minutes", "x"], ["--memory", "lots"]]
)
def test_called_wrongly(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert argv[1] in capsys.readouterr().err


def test_a_call_from_its_arguments_to_its_files(tmp_path, monkeypatch, capsys):
    clock = Clock()
    process = InProcess(interrupted_after_two, clock)
    argv = ["--dry-run", "--quick", "--part", "heads", "--out", str(tmp_path)]
    monkeypatch.setattr(command, "RESULTS", tmp_path / "none")
    assert command.main(argv, process.launch) == command.INTERRUPTED
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["Inductor", "mst"]
    process = InProcess(plans, clock)
    assert command.main([*argv, "--minutes", "0.1"], process.launch) == command.ROWS_LEFT
    assert command.main(argv, process.launch) == command.DONE
    assert "not run" not in (tmp_path / "gpu.md").read_text()
    assert "heads, N=2048, eager: dry" in capsys.readouterr().out
    (tmp_path / "gpu.md").unlink()
    assert command.main(["--tables", "--out", str(tmp_path)]) == command.DONE
    assert "| eager |" in (tmp_path / "gpu.md").read_text()


def test_ended_by_a_signal(tmp_path):
    def killed(data):
        yield done(data["wanted"][0], DRY)
        os.kill(os.getpid(), signal.SIGTERM)
        yield Hang()

    before = signal.getsignal(signal.SIGTERM)
    argv = ["--dry-run", "--part", "heads", "--out", str(tmp_path)]
    assert command.main(argv, InProcess(killed, Clock()).launch) == command.INTERRUPTED
    assert len(State.read(tmp_path).rows) == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_memory_limit_is_within_the_card():
    given = command.parse(["--memory", "24GiB"])
    gib = 2**30
    limits = [command.within_card(given, size).settings.memory_bytes for size in (None, 80 * gib)]
    assert limits == [24 * gib] * 2
    assert command.within_card(given, int(23.6 * gib)).settings.memory_bytes == 21 * gib


def plans(data):
    for row in data["wanted"]:
        yield begun(row)
        yield done(row, DRY)


def interrupted_after_two(data):
    events = plans(data)
    yield from (next(events) for _ in range(4))
    yield KeyboardInterrupt()
