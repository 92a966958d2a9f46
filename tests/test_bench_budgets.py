"""`mstpass bench budgets`: targets, the choice of budgets, and one run with tiny shapes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from mstpass.bench import budgets
from mstpass.bench.models import Head, Work
from mstpass.errors import UserError

pytestmark = pytest.mark.op_by_op

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--repeats", "1"]


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
    found = budgets.budgets_of(head.work(), (1.0, 0.5, 0.0))
    assert list(found) == [1.0]


@pytest.mark.kernels
def test_budgets_of_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def build(device: torch.device, quick: bool) -> Work:
        head = Head.build(512, 16, 2048, device)
        return head.work()

    def broken(device: torch.device, quick: bool) -> Work:
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
    fn = lambda: torch.nn.functional.dropout(torch.ones(64))
    drop = Work(fn, (), seed=1).step(fn).fn
    assert torch.equal(drop(), drop())
