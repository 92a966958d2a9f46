"""`mstpass bench fsdp`: its table follows from the rows of the ranks, which a real run makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstpass.bench import fsdp
from mstpass.bench.comparison import INDUCTOR, MST
from mstpass.bench.fsdp import BY_BLOCK, OVERHEAD, WAYS
from mstpass.bench.models import LlamaSize
from mstpass.bench.results import Row
from mstpass.errors import UserError

TINY = LlamaSize(64, 1, 2, 128, 4096, 512)


def _rank(peak: int, *seconds: float) -> list[Row]:
    """The rows of a rank, all alike but for mst's, which are half."""
    share = {name: 0.5 if name.startswith(MST) else 1.0 for name in WAYS}
    return [
        Row(
            name,
            peak_bytes=int(peak * share[name]),
            gradient_error=0.0,
            seconds=[s * share[name] for s in seconds],
        )
        for name in WAYS
    ]


def test_the_higher_peak_and_the_slower_rank_count() -> None:
    rows = fsdp.slowest_and_highest([_rank(100, 1.0, 4.0), _rank(200, 2.0, 3.0)])
    by_name = {row.name: row for row in rows}
    assert by_name[INDUCTOR].peak_bytes == 200 and by_name[INDUCTOR].seconds == [2.0, 4.0]
    assert by_name[MST].peak_bytes == 100 and by_name[MST].seconds == [1.0, 2.0]


def test_each_way_is_compared_with_inductor_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fsdp, "of_ranks", lambda *_: [_rank(2**20, 1.0), _rank(2**20, 1.0)])
    path = tmp_path / "fsdp.md"
    assert fsdp.main(["--quick", "--device", "cpu", "--markdown", str(path)]) == 0
    assert f"{MST}{BY_BLOCK}: peak / {INDUCTOR}{BY_BLOCK}, N=512: 0.500" in capsys.readouterr().out
    assert f"| {MST}{BY_BLOCK} | 0.5 | 0.50x | 0.500 | 0.50x (0.50-0.50) |" in path.read_text()


@pytest.mark.full
def test_a_rank_that_fails_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "RANKS", 1)
    with pytest.raises(UserError, match="a rank failed"):
        fsdp.of_ranks(LlamaSize(64, 1, 3, 128, 64, 32), 1)  # 64 features, 3 heads


@pytest.mark.full
def test_two_ranks_run() -> None:
    rows = {row.name: row for row in fsdp.slowest_and_highest(fsdp.of_ranks(TINY, 1))}
    assert rows.keys() == {*WAYS, OVERHEAD}
    assert "lm_head" in rows[MST].plan and "lm_head" in rows[MST + BY_BLOCK].plan
    overhead = rows.pop(OVERHEAD)
    for row in rows.values():
        assert row.peak_bytes and row.median_s and not row.error
        assert overhead.peak_bytes and overhead.peak_bytes < row.peak_bytes
