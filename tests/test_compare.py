"""A measured step is laid over the plan: peaks, curves, and the blocks that the plan lacks."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import mstpass
from mstpass import backend
from mstpass.report.compare import SnapshotError
from mstpass.report.memory_traces import memory_snapshot
from tests.html_page import ends, resize, texts
from tests.synthetic_reports import llama_report

LABELS_N = torch.arange(512)


def loss(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.tanh() @ head.t(), LABELS_N)


@pytest.fixture(scope="module")
def report() -> mstpass.Report:
    return llama_report(2)


def snapshot_of(report: mstpass.Report) -> dict[str, Any]:
    """The plan as if it had been measured to the byte."""
    assert report.details is not None
    snapshot = memory_snapshot(report.details)
    return {**snapshot, "device_traces": snapshot["device_traces"][:1]}


def test_a_step_as_planned_has_no_differences(report: mstpass.Report, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(report)))
    found = report.compare(path)
    assert found.measured_peak_bytes == found.simulated_peak_bytes == report.outcome.peak_bytes
    assert not found.not_in_plan and not found.not_measured
    assert found.blocks and all(block.node for block in found.blocks)
    assert max(abs(p.difference) for p in found.curve) <= 0.2 * found.simulated_peak_bytes
    assert "+0.0%" in str(found)


def test_what_the_plan_does_not_know_is_named(report: mstpass.Report) -> None:
    snapshot = snapshot_of(report)
    extra = {"action": "alloc", "addr": 7, "size": 123 * 2**20, "stream": 0, "time_us": 0}
    frame = {"filename": "/home/me/train.py", "line": 12, "name": "step"}
    inside = {"filename": "/usr/lib/torch/nn/module.py", "line": 1, "name": "call"}
    snapshot["device_traces"][0].insert(0, {**extra, "frames": [inside, frame]})
    found = report.compare(snapshot)
    assert found.measured_peak_bytes == found.simulated_peak_bytes + 123 * 2**20
    (block,) = found.not_in_plan
    assert (block.bytes, block.count, block.source, block.node) == (
        123 * 2**20,
        1,
        "train.py:12",
        "",
    )
    assert not found.not_measured
    text = str(found)
    assert "of these not in the plan at its peak:\n     123.0 MiB        train.py:12" in text


def test_what_was_not_measured_is_named(report: mstpass.Report) -> None:
    snapshot = snapshot_of(report)
    size = report.compare(snapshot).blocks[0].bytes
    trace = [e for e in snapshot["device_traces"][0] if (e["action"], e["size"]) != ("alloc", size)]
    found = report.compare({"device_traces": [trace]})
    assert found.measured_peak_bytes < found.simulated_peak_bytes
    assert found.not_measured[0].bytes == size and found.not_measured[0].node


def test_a_profile_of_the_cpu() -> None:
    step = torch.compile(loss, backend=backend.mst, options={"chunk_tokens": 128})
    inputs = [torch.randn(n, 64).requires_grad_() for n in (512, 4096)]
    step(*inputs).backward()
    for x in inputs:
        x.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        step(*inputs).backward()
    report = mstpass.reports()[-1]
    found = report.compare(prof)
    assert report.peak_bytes is not None
    assert 0.9 * report.peak_bytes <= found.measured_peak_bytes <= 1.1 * report.peak_bytes
    assert any(block.node and block.bytes == inputs[1].nbytes for block in found.blocks)
    assert "as measured" in str(found) and found.largest_differences


def test_the_page_shows_it(report: mstpass.Report, tmp_path: Path) -> None:
    found = report.compare(snapshot_of(report))
    report.to_html(tmp_path / "report.html", measured=found)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert data is not None
    measured = json.loads(data[1])["measured"]
    assert measured == json.loads(json.dumps(found.to_dict()))
    assert "peak memory:" in text and "measured, " in text


@pytest.mark.parametrize("width", [1440, 400])
def test_the_page_draws_it_with_a_legend(
    report: mstpass.Report, open_page: Any, browser: Any, width: int
) -> None:
    """Both curves over the whole width, in letters of one size on wide and on narrow screens."""
    found = report.compare(snapshot_of(report))
    resize(browser, width, 900)
    page = open_page(report, measured=found)
    measured, planned = texts(page, "#measured .legend .item")
    assert measured.startswith("measured, peak") and planned.startswith("as planned, peak")
    assert [key.is_displayed() for key in page.find_elements("css selector", "#measured .key")]
    plot = page.find_element("css selector", "#measured .plot")
    (left, right), (other_left, other_right) = ends(page, plot, ".series path")
    assert (left, right) == (other_left, other_right)
    assert right - left > 0.75 * plot.size["width"]
    heights = {label.size["height"] for label in plot.find_elements("css selector", "text")}
    assert min(heights) >= 10, "labels can be read"
    assert any(title.startswith("Not in the plan at its peak") for title in texts(page, "h2"))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("hacked",)


@pytest.mark.parametrize(
    ("snapshot", "why"),
    [
        ({"device_traces": [[]]}, "_record_memory_history"),
        ({}, "_record_memory_history"),
        (7, "this is a int"),
        (pickle.dumps(Evil()), "more than plain data: builtins.print"),
        (b"nonsense", "no snapshot of memory"),
    ],
)
def test_what_is_no_snapshot(
    snapshot: Any, why: str, report: mstpass.Report, tmp_path: Path, capsys: Any
) -> None:
    if isinstance(snapshot, bytes):
        (tmp_path / "file.pickle").write_bytes(snapshot)
        snapshot = tmp_path / "file.pickle"
    with pytest.raises(SnapshotError, match=why):
        report.compare(snapshot)
    assert "hacked" not in capsys.readouterr().out
