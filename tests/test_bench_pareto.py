"""`mstpass bench pareto`: which points are compared, and one run with tiny shapes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mstpass.bench import comparison, pareto, peers, results
from mstpass.bench.models import LlamaSize

pytestmark = pytest.mark.op_by_op

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--repeats", "1"]


def row(name: str, peak: int | None, *seconds: float, error: str = "") -> results.Row:
    return results.Row(name, peak_bytes=peak, seconds=list(seconds), error=error)


def test_peaks_between_the_ends_become_budgets() -> None:
    theirs = [900, 500, 500, 100, None]
    ours = [row("free", 800), row("least", 200), row("broke", 50, error="x"), row("none", None)]
    assert [c.name for c in pareto._at_peaks(theirs, ours)] == ["mst, memory_budget=0.0MiB"]
    assert pareto._at_peaks(theirs, []) == []


def test_a_torch_point_is_beaten_by_the_fastest_that_needs_no_more_memory() -> None:
    theirs = row("torch", 1000, 1.0, 1.0)
    ours = [row("more", 1031, 0.1, 0.1), row("slow", 500, 2.0, 2.0), row("fast", 1030, 0.9, 0.9)]
    assert pareto._fastest(ours, theirs, 1.03) is ours[2]
    assert pareto._fastest(ours, theirs, 0.4) is None
    base = row("Inductor", 4000, 1.0, 1.0)
    first, large = pareto._targets(base, [theirs], ours, large=True)
    assert first.met and first.value == pytest.approx(0.9)
    assert large.value == 2.0 and not large.met  # 500 of 4000 bytes
    assert pareto._targets(base, [row("t", 100, 1.0, 1.0)], ours, large=False)[0].value is None


def test_pareto_from_model_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(peers, "QUICK", LlamaSize(16, 2, 2, 64, 64, 32))

    def inductor(name: str = "Inductor", loss_fn: Any = None, **_: Any) -> comparison.Contender:
        return comparison.eager(name, loss_fn)

    def mst(name: str = "mst", memory_budget: Any = None, **_: Any) -> comparison.Contender:
        again = lambda fn: lambda: checkpoint(fn, use_reentrant=False)
        build = again if memory_budget == 0.0 else lambda fn: fn
        return comparison.Contender(name, build)

    monkeypatch.setattr(pareto, "inductor", inductor)
    monkeypatch.setattr(pareto, "mst", mst)
    table, text = tmp_path / "p.csv", tmp_path / "p.json"
    files = ["--csv", str(table), "--plots", str(tmp_path), "--json", str(text)]
    assert pareto.main([*QUICK, *files]) == 0
    assert "at torch's peaks" in capsys.readouterr().out
    (result,) = json.loads(text.read_text())["results"]
    names = [r["name"] for r in result["rows"]]
    torchs = ["Inductor", "Inductor, activation_memory_budget=0.5", pareto.CHECKPOINT]
    assert names[:3] == torchs and {"mst", "mst, memory_budget=0"} <= set(names)
    assert all(r["error"] == "" and r["time_ratio"] > 0 for r in result["rows"])
    assert len(result["targets"]) == len(torchs)
    with table.open(encoding="utf-8") as file:
        assert [line["name"] for line in csv.DictReader(file)] == names
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
