"""Reports where PyTorch users look: TORCH_LOGS, TORCH_TRACE, TORCH_COMPILE_DEBUG."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch._logging._internal import trace_log

from mstpass.plans import ChunkPlan, Outcome
from mstpass.report import store
from mstpass.report.report import Report
from mstpass.report.store import publish, summary

PROGRAM = """
import torch
import torch.nn.functional as F
x, w, y = torch.randn(512, 32), torch.randn(600, 32).requires_grad_(), torch.randint(600, (512,))
loss = lambda x, w, y: F.cross_entropy(F.linear(x, w), y)
OPTIONS = {"strict": True, "free_overhead": 1.0}
try:
    torch.compile(loss, backend="mst", options=OPTIONS)(x, w, y)
except Exception as error:
    assert "InvalidCxxCompiler" in repr(error), error
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a program that does not import mstpass writes to stderr, and where it ran."""
    folder = tmp_path_factory.mktemp("publish")
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "CXX": "false",  # the plan is made before any kernel is built, which would take long
        "TORCH_LOGS": "+mstpass",
        "TORCH_TRACE": str(folder / "trace"),
        "TORCH_COMPILE_DEBUG": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, folder


@pytest.mark.slow
def test_torch_logs(run: tuple[str, Path]) -> None:
    lines = [line for line in run[0].splitlines() if "mstpass/" in line]
    info = [line for line in lines if line.startswith("I") and "mst: " in line]
    assert len(info) == 1 and re.search(
        r"mst: lm_head, fused: \d+ chunks of \d+ tokens \| peak [\d.]+ \w+ -> [\d.]+ \w+ "
        r"\| saved for backward [\d.]+ \w+ \| 0 not in chunks \| planned in \d+\.\d\d s",
        info[0],
    )
    debug = "\n".join(line for line in lines if line.startswith("V"))
    assert "mstpass report" in debug and "saved for backward" in debug
    seconds = r"planning time: read [\d.]+ s, detect .* plan .* apply .* split [\d.]+ s"
    assert re.search(seconds, debug)
    assert "could not publish" not in run[0]


@pytest.mark.slow
def test_torch_trace(run: tuple[str, Path], tmp_path: Path) -> None:
    (file,) = (run[1] / "trace").iterdir()
    payloads: dict[str, str] = {}
    name = ""
    for line in file.read_text().splitlines():
        if line.startswith("\t"):
            payloads[name] = payloads.get(name, "") + line[1:] + "\n"
            continue
        record = json.loads(line[line.index("{") :])
        name = record.get("artifact", {}).get("name", "")
        assert not name.startswith("mstpass") or record["frame_id"] == 0
    assert payloads["mstpass_report"].startswith("mst: lm_head, fused")
    (tmp_path / "report.json").write_text(payloads["mstpass_report_json"])
    report = Report.from_json(tmp_path / "report.json")
    assert str(report) in payloads["mstpass_report"] and report.details is not None


@pytest.mark.slow
def test_torch_compile_debug(run: tuple[str, Path]) -> None:
    (folder,) = (run[1] / "torch_compile_debug").glob("run_*/torchinductor/*_mstpass.*")
    assert any(folder.parent.glob("*forward*")), "Inductor's own folders are beside it"
    report = Report.from_json(folder / "mstpass_report.json")
    assert str(report) in (folder / "mstpass_report.txt").read_text()
    if find_spec("graphviz") is not None:
        assert (folder / "mstpass_report.dot").read_text() == report.to_dot()
    assert json.loads((folder / "mstpass_perfetto.json").read_text())["traceEvents"]


class Unwanted(Report):
    """Its text must not be made."""

    def __str__(self) -> str:
        raise RuntimeError("made")

    json_text = __str__


def test_nothing_is_made_where_nothing_is_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_log, "handlers", [])  # pytest listens to the trace
    publish(Unwanted(Outcome()), {})
    assert not caplog.records


def test_a_report_that_cannot_be_published_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_log, "handlers", [])
    with caplog.at_level(logging.DEBUG, logger=store.__name__):
        publish(Unwanted(Outcome()), {})
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
    assert "could not publish a report: RuntimeError: made" in caplog.text


def test_summary_counts_equal_loops() -> None:
    plan = ChunkPlan("mlp", "save", "", 64, 16, 4, 8, 2, (), (), ())
    line = summary(Report(Outcome(regions=(plan, plan))), {"read": 0.5, "plan": 0.75})
    assert line.startswith("mst: mlp, save: 4 chunks of 16 tokens (x 2) | saved for backward 0 B")
    assert line.endswith("planned in 1.25 s")
    assert "nothing runs in chunks" in summary(Report(Outcome(), cached=True), {})
