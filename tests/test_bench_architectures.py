"""`mstpass bench architectures`: its rows, and what a later call keeps of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mstpass.bench import architectures, comparison, results
from mstpass.bench.huggingface import TINY
from mstpass.errors import UserError

pytest.importorskip("transformers")
pytestmark = pytest.mark.op_by_op


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager mode stands in for Inductor, and nothing is timed twice."""
    monkeypatch.setattr(architectures, "TINY", dataclasses.replace(TINY, layers=1, length=512))
    least = comparison.mst(architectures.LEAST, memory_budget=0.0)
    stand_ins = [comparison.eager(), comparison.eager("Inductor"), comparison.mst(), least]
    monkeypatch.setattr(architectures, "_contenders", lambda: stand_ins)


def rows(path: Path, *names: str) -> dict[str, list[str]]:
    models = [word for name in names for word in ("--model", name)]
    argv = ["--quick", "--repeats", "1", "--device", "cpu", "--markdown", str(path)]
    assert architectures.main([*argv, *models]) == 0
    lines = [line.strip("|").split("|") for line in path.read_text().splitlines() if "|" in line]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in lines[2:]}


@pytest.mark.full
def test_a_row_is_renewed_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "architectures.md"
    (llama,) = rows(path, "llama").values()
    assert len(llama) == len(architectures.COLUMNS)
    assert "lm_head fused" in llama[4] and "attention recompute" in llama[4]
    assert all(llama[i].endswith("x") for i in (2, 3, 5, 6)), llama

    def missing(*_: object) -> None:
        raise AttributeError("module transformers has no attribute FalconConfig")

    monkeypatch.setattr(architectures, "_measured", missing)
    found = rows(path, "falcon")
    assert found["llama"] == llama and "no attribute FalconConfig" in found["falcon"][1]
    monkeypatch.setattr(architectures, "TINY", dataclasses.replace(TINY, length=64))
    assert list(rows(path, "falcon")) == ["falcon"]  # rows of other sizes are no longer true


def test_an_error_is_shown_in_place_of_figures() -> None:
    good, bad = results.Row("eager"), results.Row("Inductor", error="a gradient differs")
    measured = {row.name: row for row in (good, bad, results.Row("mst"), results.Row("x"))}
    cells = architectures._cells("falcon", measured, [])
    assert cells[1] == "Inductor: a gradient differs" and set(cells[2:-1]) == {"-"}


def test_an_unknown_model() -> None:
    with pytest.raises(UserError, match=r"'lama' is unknown; choose from: llama, "):
        architectures.main(["--quick", "--model", "lama"])
