"""What work costs on a device: the measured costs, what is stored, and the plans that use it."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mstpass import backend, pipeline
from mstpass.bench import loops
from mstpass.captured import OF_INPUTS
from mstpass.graph import device_costs, gpu_costs
from mstpass.graph.device_costs import GOOD, Costs
from mstpass.graph.gpu_costs import GpuCosts, least_rows
from mstpass.graph.joint import JointGraph
from mstpass.graph.loop_work import ROWS, LoopWork, Product, TokenProduct
from mstpass.graph.measured_costs import ChunkCosts, MeasuredCosts, MeasuredGpuCosts
from mstpass.graph.node_cost import time_us
from mstpass.options import Options
from tests.checks import joint_graph

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TABLE = ChunkCosts(((64, 1.5), (256, 1.1)), chunk_us=100.0, flops_per_us=1000.0)
SOME = MeasuredCosts(TABLE, 1e4)


def work(operations_per_token: int) -> LoopWork:
    products = (TokenProduct(Product(1000, 1, operations_per_token // 2), ROWS),)
    return LoopWork(1000, products)


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTPASS_COSTS", str(tmp_path / "costs.json"))
    device_costs._stored.cache_clear()


@given(st.integers(1, 5000), st.integers(2, 10**9))
def test_more_rows_never_cost_more(rows: int, operations: int) -> None:
    here, there = (SOME.relative_time(work(operations), n) for n in (rows, rows + 1))
    assert there <= here + 1e-9


@given(st.integers(1000, 10**9), st.sampled_from([GOOD, 1.10, 1.5]))
def test_least_rows_keep_the_limit_and_fewer_do_not(operations: int, limit: float) -> None:
    some = work(operations)
    rows = least_rows(SOME.relative_time, some, limit)
    assert rows >= some.tokens or SOME.relative_time(some, rows) <= limit
    *_, shorter = (0, *itertools.takewhile(lambda length: length < rows, gpu_costs._lengths()))
    assert not shorter or SOME.relative_time(some, shorter) > limit
    assert least_rows(SOME.slowdown, some, limit) <= rows


def test_measured_points_are_met() -> None:
    assert TABLE.slowdown_at(64) == pytest.approx(1.5)
    assert TABLE.slowdown_at(256) == pytest.approx(1.1)
    assert TABLE.slowdown_at(10_000) == 1
    assert SOME.relative_time(work(2000), 256) == pytest.approx(1.1 + 100 / (256 * 2))


def test_a_loop_without_products_takes_the_time_of_its_chunks() -> None:
    assert SOME.loop_us(LoopWork(1000, (), computed_bytes=1e6), 300) == 100 + 4 * 100


def test_a_fused_op_costs_what_it_computes() -> None:
    """Six cheap ops in one kernel add little to its time; six slow ones more than its traffic."""

    def us(op: Callable[[torch.Tensor], torch.Tensor], times: int) -> float:
        def loss(x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = op(x)
            return x.sum()

        joint = JointGraph(*joint_graph(loss, torch.ones(2**20, requires_grad=True)))
        return sum(time_us(joint, node) for node in joint.forward)

    for op in (torch.neg, torch.relu, lambda x: torch.where(x > 2, x, x + 1.0)):
        assert us(op, 7) < 2.2 * us(op, 1)
    for op in (torch.exp, torch.tanh, torch.erf):
        assert us(op, 7) > 3 * us(op, 1)


def test_a_loop_finds_a_chunks_values_in_the_cache() -> None:
    loop = LoopWork(1000, (), moved_bytes=1e9)
    assert SOME.loop_us(loop, 10) < 0.4 * SOME.whole_us(loop)
    assert SOME.loop_us(loop, 1000) >= SOME.whole_us(loop), "no cache holds it"


@pytest.mark.parametrize("rows", [(), (256, 64), (0, 5), (64, 64)])
def test_a_table_out_of_order_is_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        ChunkCosts(tuple((r, 1.0) for r in rows), 1.0, 1.0)


def test_rates_that_are_no_rates_are_refused() -> None:
    for change in ({"flops_per_us": 0.0}, {"rates": (("float16", -1.0),)}):
        with pytest.raises(ValueError, match="="):
            dataclasses.replace(TABLE, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copied_bytes_per_us"):
        dataclasses.replace(TABLE, copied_bytes_per_us=0.0)


def _table_in_use() -> ChunkCosts:
    costs = device_costs.costs_of(CPU)
    assert isinstance(costs, MeasuredCosts)
    return costs.table


def _plan() -> pipeline.Result:
    weight = torch.randn(4096, 64, requires_grad=True)
    hidden, target = torch.randn(2048, 64, requires_grad=True), torch.randint(4096, (2048,))
    joint, outputs = joint_graph(lambda h, w: F.cross_entropy(h @ w.t(), target), hidden, weight)
    return pipeline.run(joint, Options(), num_fwd_outputs=outputs, stop_after="plan")


def test_plans_and_cache_keys_follow_what_was_stored() -> None:
    key = backend.uuid(Options())
    fast = ChunkCosts(((128, 1.04),), chunk_us=1.0, flops_per_us=1e5)
    path = device_costs.store(CPU, fast)
    assert _table_in_use() == fast
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
        assert _table_in_use() == device_costs._CPU


@pytest.mark.full
def test_the_sweep_measures_every_point() -> None:
    measured = loops.measure(CPU, quick=True)
    assert [rows for rows, _ in measured.slowdown] == list(loops.QUICK_SWEEP.rows)
    assert all(slow >= 1 for _, slow in measured.slowdown)
    assert measured.flops_per_us > 0
    assert measured.dtype == "float32"
    assert {name for name, _ in measured.rates} == {"bfloat16", "float16"}
    assert measured.copied_bytes_per_us is not None and measured.copied_bytes_per_us > 0
    device_costs.store(CPU, measured)
    assert _table_in_use() == measured, "what is stored is read again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4, 16])
def test_the_measured_products_run_in_every_dtype(dtype: torch.dtype, rows: int) -> None:
    """On the meta device: products of half precision that add in float32 run on GPUs alone."""
    if torch.__version__ < "2.12" and dtype is torch.bfloat16 and rows == 4:
        pytest.skip("torch 2.11 has no sum in float32 on the meta device")
    x, w = (torch.zeros(n, 8, dtype=dtype, device="meta") for n in (16, 32))
    summed = loops._products(x, w, rows)()
    assert summed.dtype == (dtype if rows == 16 else torch.float32)


# ---- GPUs --------------------------------------------------------------------------------------
Report = Callable[..., None]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    """A function that makes torch report a GPU."""

    def reported(name: str, major: int, minor: int, multiprocessors: int) -> None:
        found = types.SimpleNamespace(
            name=name, major=major, minor=minor, multi_processor_count=multiprocessors
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    return reported


def _gpu_costs() -> GpuCosts:
    costs: Costs = device_costs.costs_of(GPU)
    assert isinstance(costs, GpuCosts)
    return costs


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU reports its own kind")
def test_without_a_gpu_the_default_kind_counts() -> None:
    assert _gpu_costs().gpu.name == "h100"
    assert device_costs.costs_of(torch.device("meta")) == _gpu_costs()
    nothing = f"-{OF_INPUTS.key}"
    assert backend.uuid(Options()).endswith(nothing), "nothing stored, no GPU: nothing in the key"


def test_the_kind_is_what_torch_reports(report: Report) -> None:
    report("NVIDIA L4", 8, 9, 58)
    assert _gpu_costs().gpu.name == "l4"
    key = backend.uuid(Options())
    report("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0, 60)
    part = _gpu_costs()
    assert (part.gpu.name, part.gpu.multiprocessors) == ("h100", 60)
    assert part.rate(torch.bfloat16) == pytest.approx(989.4e6 * 0.8 * 60 / 132)
    assert backend.uuid(Options()) != key, "chunk lengths follow the device, so caches do"
    report("NVIDIA Thor", 11, 0, 20)
    assert _gpu_costs().gpu.capability == (10, 0), "unknown: the next lower capability"
    report("Tesla K80", 3, 7, 13)
    assert _gpu_costs().gpu.capability == (7, 0), "older than all that are known"


def test_tf32_follows_the_setting_of_torch(report: Report) -> None:
    report("NVIDIA A100-SXM4-80GB", 8, 0, 108)
    exact, key = _gpu_costs().rate(torch.float32), backend.uuid(Options())
    torch.set_float32_matmul_precision("high")
    try:
        assert _gpu_costs().rate(torch.float32) > 7 * exact
        assert backend.uuid(Options()) != key
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _gpu_costs().rate(torch.float32) == exact


def test_stored_measurements_of_a_gpu_are_used(report: Report) -> None:
    report("NVIDIA A100-SXM4-80GB", 8, 0, 108)
    table = ChunkCosts(((512, 1.3),), 50.0, 270e6, "bfloat16")
    path = device_costs.store(GPU, table)
    assert "NVIDIA A100-SXM4-80GB" in path.read_text()
    costs = device_costs.costs_of(GPU)
    assert isinstance(costs, MeasuredGpuCosts) and costs.table == table
    assert device_costs.costs_of(CPU) == device_costs._cpu_costs(
        device_costs._CPU, torch.get_num_threads()
    )


def test_a_file_of_an_older_version_is_read() -> None:
    name = device_costs.device_name(CPU)
    entry = '{"slowdown": [[64, 1.5]], "chunk_us": 2.0, "flops_per_us": 3.0}'
    device_costs.costs_path().write_text(f'{{"{name}": {entry}, "NVIDIA L4": {entry}}}')
    assert _table_in_use() == ChunkCosts(((64, 1.5),), 2.0, 3.0)
    known = device_costs._stored(device_costs.costs_path())
    assert known["NVIDIA L4"].dtype == "bfloat16"
