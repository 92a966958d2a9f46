"""What reports say of saved values that wait on the host, and of the copies there and back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import mstpass
from mstpass.bench.models import LlamaSize, llama
from mstpass.report.data import phase_times
from mstpass.report.report import Report
from mstpass.report.store import summary
from tests.host_on_cpu import host_on_cpu
from tests.synthetic_reports import llama_report, report_with_copies

MIB = 2**20


@pytest.fixture(scope="module")
def report() -> Report:
    return report_with_copies(3)


@pytest.fixture(scope="module")
def planned() -> Report:
    """The report of a real plan."""
    model, ids_BS, target_BS = llama(LlamaSize(64, 2, 4, 160, 300, 512), torch.device("meta"))
    options = {"memory_budget": 0.3, "host_budget": "1GiB"}
    with host_on_cpu():
        return mstpass.explain(model, ids_BS, target_BS, options=options)


# ---- text --------------------------------------------------------------------------------------
def test_the_text_tells_host_from_device(report: Report) -> None:
    text = str(report)
    assert "saved for backward: 18 values, 72.0 MiB (chosen by peak_search)" in text
    assert "waiting in host memory: 3 values, 6.0 MiB (6.0 MiB pinned)" in text
    assert "their copies take 6.00 ms, of which the device waits for 1.00 ms (estimated)" in text
    (layers,) = (line.split() for line in text.splitlines() if line.startswith("    layers.*  "))
    assert layers == ["layers.*", "-", "6.0", "MiB", "-", "6.0", "MiB"]
    assert report.saved_bytes == 72 * MIB and report.host_bytes == 6 * MIB


def test_without_copies_the_text_has_no_word_of_them() -> None:
    assert " host" not in str(llama_report(3))


def test_names_of_copies_tell_the_node_that_they_copy(planned: Report) -> None:
    assert planned.details is not None and planned.details.after is not None
    after = planned.details.after
    names = Counter(name.partition(":")[0] for name in after.moments if ":" in name)
    assert names["offload"] == names["offloaded"] == names["reload"] == len(planned.offloaded) > 0
    nodes = {node.name for node in planned.details.nodes}
    copied = {name for name in after.moments if name.partition(":")[0] in ("offload", "reload")}
    assert {name.partition(":")[2] for name in copied} == planned.offloaded <= nodes
    words = {life.node.rpartition(":")[0] for life in after.lives}
    assert words <= {"", "loop", "reload"}, "what is on the host takes no memory here"
    back = [life for life in after.lives if life.node.startswith("reload:")]
    assert {life.node.removeprefix("reload:") for life in back} == planned.offloaded
    assert all(life.bytes and life.start >= after.first_backward for life in back)
    for moment, size in enumerate(after.bytes):
        assert sum(life.bytes for life in after.alive_at(moment)) == size


def test_one_line_and_a_drawing_tell_host_from_device(report: Report) -> None:
    assert "saved for backward 72.0 MiB + 6.0 MiB on the host" in summary(report, {})
    assert "on the host" not in summary(llama_report(1), {})
    pytest.importorskip("graphviz")
    assert report.to_dot(fold="none").count("saved 2.0 MiB, on the host") == 3
    assert "2.0 MiB × 3, on the host" in report.to_dot()
    assert "on the host" not in llama_report(1).to_dot()


# ---- files -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["report", "planned"])
def test_json_comes_back_whole(kind: str, tmp_path: Path, request: Any) -> None:
    report: Report = request.getfixturevalue(kind)
    report.to_json(tmp_path / "report.json")
    back = Report.from_json(tmp_path / "report.json")
    assert back.outcome == report.outcome and back.details == report.details
    assert str(back) == str(report)


def test_json_from_before_there_were_copies_is_read(tmp_path: Path) -> None:
    report = llama_report(1)
    data = json.loads(report.json_text())
    for field in ("transfers", "forward_us", "backward_us"):
        del data["save_plan"][field]
    for value in data["save_plan"]["saved"]:
        del value["on_host"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert Report.from_json(tmp_path / "old.json").outcome == report.outcome


def test_perfetto_has_the_copies_beside_the_step(report: Report, tmp_path: Path) -> None:
    report.to_perfetto(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    (pid,) = (
        event["pid"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name" and event["args"]["name"].startswith("copies beside")
    )
    assert "estimated" in trace["otherData"]["axis of copies"]
    events = [event for event in trace["traceEvents"] if event["pid"] == pid]
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}

    def slices(thread: str) -> list[tuple[str, float, float]]:
        found = [e for e in events if e["ph"] == "X" and e["tid"] == threads[thread]]
        return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found]

    plan = report.outcome.save_plan
    assert plan is not None
    first, last = plan.transfers[0].node, plan.transfers[2].node
    assert slices("device") == [
        ("forward", 0, 30_400),
        (f"wait for the copy of {last}", 30_000, 30_400),
        ("backward", 30_400, 61_000),
        (f"wait for the copy of {last}", 30_800, 31_400),
    ]
    assert slices("to the host")[0] == (first, 9_400, 10_400)
    assert slices("from the host")[0] == (last, 30_400, 31_400)


def test_perfetto_knows_the_module_of_what_is_back(tmp_path: Path) -> None:
    report_with_copies(1).to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (back,) = (e for e in events if e["ph"] == "b" and e["name"].startswith("reload:"))
    assert back["args"]["module"] == "layers.0" and back["args"]["source"] == "model.py:12"


def test_perfetto_without_copies_has_no_process_of_them(tmp_path: Path) -> None:
    llama_report(1).to_perfetto(tmp_path / "trace.json")
    assert "copies" not in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("kind", ["report", "planned"])
def test_each_wait_ends_with_its_copy_within_the_phase(kind: str, request: Any) -> None:
    report: Report = request.getfixturevalue(kind)
    plan = report.outcome.save_plan
    assert plan is not None and plan.transfers
    for phase in phase_times(plan):
        assert 0 <= phase.wait_us <= phase.copy_us
        ends = [0.0]
        for copy in phase.copies:
            assert ends[-1] <= copy.start_us <= copy.end_us - copy.stall_us
            ends.append(copy.end_us)
        assert ends[-1] <= phase.end_us + 1e-6
