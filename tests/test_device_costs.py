"""What chunks cost on a device: the model, the file that stores it, and the plans that use it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mstpass import backend, pipeline
from mstpass.bench import measure_chunk_costs
from mstpass.graph import device_costs
from mstpass.graph.device_costs import GOOD, TOLERABLE, ChunkCosts
from mstpass.options import Options
from tests.checks import joint_graph

CPU = torch.device("cpu")
SOME = ChunkCosts(((64, 1.5), (256, 1.1)), chunk_us=100.0, flops_per_us=1000.0)


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTPASS_COSTS", str(tmp_path / "costs.json"))
    device_costs._stored.cache_clear()


@given(st.integers(1, 5000), st.floats(1, 1e9))
def test_more_rows_never_cost_more(rows: int, flops_per_row: float) -> None:
    here, there = (SOME.relative_time(n, flops_per_row) for n in (rows, rows + 1))
    assert there <= here + 1e-9


@given(st.floats(1e3, 1e9), st.sampled_from([GOOD, TOLERABLE, 1.5]))
def test_least_rows_keep_the_limit_and_fewer_do_not(flops_per_row: float, limit: float) -> None:
    rows = SOME.least_rows(flops_per_row, limit)
    assert SOME.relative_time(rows, flops_per_row) <= limit
    assert rows == 16 or SOME.relative_time(rows - 16, flops_per_row) > limit


def test_measured_points_are_met() -> None:
    assert SOME.relative_time(64, math.inf) == pytest.approx(1.5)
    assert SOME.relative_time(256, math.inf) == pytest.approx(1.1)
    assert SOME.relative_time(10_000, math.inf) == 1


@pytest.mark.parametrize("rows", [(), (256, 64), (0, 5), (64, 64)])
def test_a_table_out_of_order_is_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        ChunkCosts(tuple((r, 1.0) for r in rows), 1.0, 1.0)


def _plan() -> pipeline.Result:
    weight = torch.randn(4096, 64, requires_grad=True)
    hidden, target = torch.randn(2048, 64, requires_grad=True), torch.randint(4096, (2048,))
    joint, outputs = joint_graph(lambda h, w: F.cross_entropy(h @ w.t(), target), hidden, weight)
    return pipeline.run(joint, Options(), num_fwd_outputs=outputs, stop_after="plan")


def test_plans_and_cache_keys_follow_what_was_stored() -> None:
    key = backend.uuid(Options())
    fast = ChunkCosts(((128, 1.04),), chunk_us=1.0, flops_per_us=1e5)
    path = device_costs.store(CPU, fast)
    assert device_costs.costs_of(CPU) == fast
    assert backend.uuid(Options()) != key
    (before,) = _plan().outcome.regions
    slow = dataclasses.replace(fast, slowdown=((600, 1.12), (1000, 1.04)))
    device_costs.store(CPU, slow)
    (after,) = _plan().outcome.regions
    assert before.chunk_tokens < after.chunk_tokens
    device_costs.store(CPU, dataclasses.replace(slow, slowdown=((2048, 1.5),)))
    (rejection,) = _plan().outcome.rejections
    assert "fewer than two chunks" in rejection.reason
    path.unlink()
    device_costs._stored.cache_clear()
    assert backend.uuid(Options()) == key


@pytest.mark.parametrize("text", ["no json", "[]", '{"x": {"slowdown": []}}', '{"x": 3}'])
def test_a_broken_file_is_ignored_with_a_warning(text: str) -> None:
    device_costs.costs_path().write_text(text)
    with pytest.warns(UserWarning, match="bench loops --store"):
        assert device_costs.costs_of(CPU) == device_costs._CPU


def test_the_sweep_measures_every_point() -> None:
    measured = measure_chunk_costs.measure(CPU, quick=True)
    assert [rows for rows, _ in measured.slowdown] == list(measure_chunk_costs.QUICK.rows)
    assert all(slow >= 1 for _, slow in measured.slowdown)
    assert measured.flops_per_us > 0
