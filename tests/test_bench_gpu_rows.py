"""The rows of `mstpass bench gpu`: steps side by side, dry runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mstpass.bench import comparison
from mstpass.bench.comparison import eager
from mstpass.bench.gpu import heads, llama, results, side_by_side
from mstpass.bench.gpu.device import NoDevice, time_in_turn
from mstpass.bench.gpu.runner import PARTS, Runner
from mstpass.bench.gpu.state import (
    DRY,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    SKIPPED,
    Case,
    Job,
    Settings,
    State,
)
from mstpass.errors import MissingPackageError
from tests.gpu_bench import Calls, Clock, CpuDevice, done_by


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    monkeypatch.setattr(heads, "QUICK_WIDTH", 16)
    monkeypatch.setattr(heads, "QUICK_VOCABULARY", 512)
    monkeypatch.setattr(heads, "QUICK_TOKENS", (64,))


def outcomes(ways, device=None, known=None, settings=None, wanted=None):
    """Measure ways of a tiny head, one after the other; returns the outcomes by row."""
    names = tuple(way.name for way in ways)
    case = Case("heads", "N=64", names, 60.0)
    settings = settings or Settings(Path(), quick=True)
    build = lambda device: heads.workload(64, True, device)
    found = {}
    for row in wanted or names:
        job = Job(settings, case, row, device or CpuDevice(), {**(known or {}), **found})
        found[row] = json.loads(json.dumps(side_by_side.measure(job, build, ways)))
    return found


def wrong(x, w, y):
    return F.cross_entropy(F.linear(x, w).float() * 1.5, y)


def base():
    return eager("Inductor")


# ---- side by side ------------------------------------------------------------------------------
def test_ways_are_measured_beside_the_first():
    found = outcomes([base(), eager(), eager("wrong", wrong), eager("x", missing="none")])
    assert [found[name]["status"] for name in ("Inductor", "eager")] == [MEASURED] * 2
    row = found["eager"]
    assert row["peak_bytes"] == CpuDevice.peak and row["gradient_error"] == 0.0
    ratios = [a / b for a, b in zip(row["seconds"], row["base_seconds"], strict=True)]
    assert row["ratio"][1:] == pytest.approx([min(ratios), max(ratios)])
    assert row["flops_per_s"] == pytest.approx(6 * 64 * 16 * 512 / row["median_s"])
    assert row["clocks"] == "SM 1 MHz"
    assert found["wrong"]["status"] == FAILED and "differs from" in found["wrong"]["text"]
    assert found["x"] == {"status": SKIPPED, "text": "none"}


def test_out_of_memory_is_the_outcome_of_a_row():
    def large(x, w, y):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    found = outcomes([base(), eager("large", large), eager()])
    assert found["large"] == {"status": OUT_OF_MEMORY, "text": ""}
    assert found["eager"]["ratio"] is not None


def test_rows_whose_first_way_did_not_run_have_no_ratio():
    known = {"Inductor": {"status": OUT_OF_MEMORY, "text": ""}}
    found = outcomes([base(), eager()], known=known, wanted=("eager",))
    assert found["eager"]["status"] == MEASURED and found["eager"]["ratio"] is None


def test_out_of_memory_behind_other_errors():
    error = RuntimeError("backend failed")
    assert not side_by_side.is_out_of_memory(error)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert side_by_side.is_out_of_memory(error)


def test_steps_are_timed_in_turn():
    order = []

    class Recorder(CpuDevice):
        def seconds(self, step):
            step()
            return 3.0 if len(order) % 2 else 1.0

    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    times = time_in_turn(Recorder(), steps, quick=False)
    assert order[:6] == ["a", "b", "a", "b", "b", "a"]
    assert {len(seconds) for seconds in times.values()} == {10}
    assert len(time_in_turn(Recorder(), steps, quick=True)["a"]) == 2


def test_the_ways_of_a_head_agree():
    names = [way.name for way in heads.ways()]
    assert names[:4] == [
        "Inductor",
        "mst",
        "mst, memory_budget=0.0",
        "Inductor, auto_chunker",
    ]
    x, w, y = torch.randn(8, 4), torch.randn(16, 4), torch.arange(8)
    for way in heads.ways():
        if way.loss_fn is not None and not way.missing:
            assert torch.allclose(way.loss_fn(x, w, y), heads.head_loss(x, w, y), atol=1e-5)


# ---- a dry run ---------------------------------------------------------------------------------
def test_a_dry_run_traces_every_way():
    settings = Settings(Path(), quick=True, dry=True)
    installed = eager("other", own_kernels=True)
    ways = [base(), comparison.mst(chunk_tokens=16), eager(), installed]
    found = outcomes(ways, NoDevice(), settings=settings)
    assert {row["status"] for row in found.values()} == {DRY}
    assert found["mst"]["simulated_bytes"] > 0 and "fused in 4" in found["mst"]["plan"]
    assert "not traced" in found["other"]["plan"]
    text = results.steps_table(
        "N=64", [{"row": k, **v} for k, v in found.items()], {"card": "none"}
    )
    assert {row[1] for row in text.rows} == {"dry"}


def test_a_dry_calibration_shows_what_is_assumed(tmp_path):
    settings = Settings(tmp_path, dry=True)
    case = heads.loop_cases(settings)[0]
    found = heads.loop_work(Job(settings, case, case.rows[0], NoDevice()))
    row = {"row": case.rows[0], **found}
    assert row["status"] == DRY
    table = results.costs_table(case.name, [row])
    assert ("1024 rows a chunk, time / whole", "-") in [line[:2] for line in table.rows]


def test_every_part_has_cases_that_it_knows(tmp_path):
    for quick in (False, True):
        settings = Settings(tmp_path, quick=quick)
        names = [(c.part, c.name) for part in PARTS.values() for c in part.cases(settings)]
        assert len(set(names)) == len(names) >= 5
    assert {part for part, _ in names} == set(PARTS)
    assert set(results._TITLES) == set(PARTS)


@pytest.mark.parametrize(
    "transformers", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.full])]
)
def test_a_dry_run_of_blocks(tmp_path, monkeypatch, transformers):
    small = llama.Shape(32, 1, 2, 64, 256, 1024, key_value_heads=1)
    monkeypatch.setattr(llama, "QUICK", small)
    monkeypatch.setattr(llama, "ways", few_ways)
    if not transformers:
        monkeypatch.setattr(llama, "config_of", needs_transformers)
    settings = Settings(tmp_path, quick=True, dry=True)
    state = State.open(tmp_path, {"card": "none", "dry": True, "quick": True, "torch": "2"})
    state.begin_run({})
    calls = Calls(done_by(NoDevice()), Clock())
    Runner(settings, state, calls, clock=Clock()).run([PARTS["blocks"]], 600)
    statuses = {row["status"] for row in state.rows.values()}
    assert statuses == {DRY if transformers else SKIPPED}, state.rows


def needs_transformers(path):
    raise MissingPackageError("mstpass bench gpu needs transformers")


def few_ways():
    return [comparison.inductor(), comparison.mst(), eager()]
