"""`mstpass bench sharded`: its floor, and a tiny run on two ranks."""

from __future__ import annotations

import pytest
import torch

from mstpass.bench import sharded
from mstpass.bench.harness import Arguments
from mstpass.bench.results import Row


def test_the_floor_is_a_ranks_share_and_one_chunk() -> None:
    row = Row("mst", plan="lm_head fused in 4")
    assert sharded._floor(row, 512, 64, 4096) == 4 * (2048 * 64 + 512 * 64 + 128 * 2048)
    assert sharded._floor(Row("Inductor"), 512, 64, 4096) is None


@pytest.mark.full
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_a_tiny_run_meets_its_targets() -> None:
    result = sharded.run(Arguments(repeats=1, quick=True, device=torch.device("cpu")))
    assert [row[0] for row in result.tables[0].rows] == ["Inductor", "mst", sharded.LEAST]
    assert all(target.met for target in result.targets), result.targets
