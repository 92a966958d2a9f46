"""`mstpass bench sequences`: tables and targets from the rows of ranks, which a real run makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstpass.bench import sequences
from mstpass.bench.comparison import INDUCTOR, MST
from mstpass.bench.harness import Arguments
from mstpass.bench.models import LlamaSize
from mstpass.bench.results import Row
from mstpass.bench.sequences import LEAST, WAYS

TINY = LlamaSize(64, 1, 4, 128, 2048, 128)


def _rank(size: LlamaSize, ranks: int, arguments: Arguments) -> list[list[Row]]:
    """Rows of ranks: mst's peak is half of Inductor's, and grows with the number of ranks."""
    shares = {INDUCTOR: 4.0, MST: 2.0}
    rows = [
        Row(
            name,
            peak_bytes=int(2**20 * (shares.get(name, 1.0) + ranks / 10)),
            simulated_bytes=2**20,
            gradient_error=0.0,
            seconds=[1.0, 2.0],
        )
        for name in WAYS
    ]
    return [rows] * ranks


def test_the_targets_are_about_all_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sequences, "of_ranks", _rank)
    path = tmp_path / "sequences.md"
    assert sequences.main(["--quick", "--device", "cpu", "--markdown", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{LEAST}: highest / lowest peak of a rank: 1.091, target <= 1.05: missed" in said
    assert f"{LEAST}: measured / simulated peak, the worst: 1.200" in said
    assert f"{LEAST}: peak / {INDUCTOR}, the worst: 0.286, target <= 0.35: met" in said
    assert f"{MST}: time / {INDUCTOR}, 2 ranks: 1.000" in said
    assert "Ranks: 2, with 128 tokens on each" in path.read_text()


@pytest.mark.full
def test_two_ranks_run() -> None:
    arguments = Arguments(repeats=1, quick=True, device=torch.device("cpu"))
    rows = {row.name: row for row in sequences.of_ranks(TINY, 2, arguments)[0]}
    assert rows.keys() == WAYS.keys()
    assert all(row.peak_bytes and row.median_s for row in rows.values())
