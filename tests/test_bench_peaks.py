"""`mstpass bench pareto` and `bench budgets`: their parts, and each once with tiny shapes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mstpass.bench import budget_models, budgets, comparison, pareto, peers
from mstpass.bench.models import Head, LlamaSize
from mstpass.errors import UserError

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--repeats", "1"]


def row(name: str, peak: int | None, *seconds: float, error: str = "") -> comparison.Row:
    return comparison.Row(name, peak_bytes=peak, seconds=list(seconds), error=error)


# ---- pareto ------------------------------------------------------------------------------------
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


# ---- budgets -----------------------------------------------------------------------------------
def point(budget: int, simulated: int | None, measured: int | None) -> budgets.Point:
    return budgets.Point("m", 0.5, budget, simulated, measured, 0.0, "", "")


def test_a_model_is_as_good_as_its_worst_budget() -> None:
    points = [point(100, 90, 99), point(100, 100, 94)]
    within, deviation, falling = budgets._targets("m", points)
    assert within.value == 0.99 and within.met
    assert deviation.value == pytest.approx(0.1) and not deviation.met
    assert falling.value == 1.0 and falling.met
    without = [*points, point(100, None, None)]
    assert [t.met for t in budgets._targets("m", without)] == [False, False, False]
    rising = [point(200, 80, 80), point(300, 90, 90), point(100, 84, 84)]
    assert budgets._targets("m", rising)[2].value == 1.05
    assert budgets._table(points).rows[1][5:7] == ("-6.0 %", "met")


def test_budgets_that_are_close_are_one() -> None:
    head = Head.build(64, 16, 512, CPU)
    found = budgets.budgets_of(budgets.Model(head.loss, head.step), (1.0, 0.5, 0.0))
    assert list(found) == [1.0]


def test_budgets_of_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def build(device: torch.device, quick: bool) -> budgets.Model:
        head = Head.build(512, 16, 2048, device)
        return budgets.Model(head.loss, head.step)

    def broken(device: torch.device, quick: bool) -> budgets.Model:
        raise ValueError("no such luck")

    monkeypatch.setattr(budgets, "MODELS", {"broken": broken, "head": build})
    monkeypatch.setattr(budgets, "_QUICK_SHARES", (0.0,))
    table = tmp_path / "b.csv"
    assert budgets.main([*QUICK, "--csv", str(table)]) == 0
    with table.open(encoding="utf-8") as file:
        failed, line = csv.DictReader(file)
    assert failed["error"] == "ValueError: no such luck"
    assert line["error"] == "" and float(line["gradient_error"]) < 1e-4
    assert int(line["measured_bytes"]) <= int(line["budget_bytes"])
    assert abs(float(line["deviation"])) < 0.05


def test_an_unknown_model_is_named() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match="'gpt5' is unknown; choose from: llama; "):
        budgets.main([*QUICK, "--model", "gpt5"])


def test_steps_with_dropout_draw_the_same_again() -> None:
    drop = budget_models._seeded(lambda: torch.nn.functional.dropout(torch.ones(64)))
    assert torch.equal(drop(), drop())
