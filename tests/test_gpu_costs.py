"""The cost model of GPUs: products by tiles and waves, loops with the time of the host."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstpass.gpus import GPUS, gpu
from mstpass.graph import gpu_costs
from mstpass.graph.call_work import AttentionWork
from mstpass.graph.device_costs import GOOD
from mstpass.graph.gpu_costs import GRAIN, KERNEL_US, GpuCosts, least_rows
from mstpass.graph.loop_work import (
    BATCH,
    COLUMNS,
    CONTRACTED,
    ROWS,
    LoopWork,
    Product,
    TokenProduct,
)
from mstpass.graph.measured_costs import ChunkCosts, MeasuredGpuCosts

BF16 = torch.bfloat16
H100, H200 = GpuCosts(gpu("h100")), GpuCosts(gpu("h200"))
# An H100 whose memory takes no time, to see the tiles
COMPUTE = GpuCosts(dataclasses.replace(gpu("h100"), memory_bytes_per_us=1e15))
DTYPES = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, BF16, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.int64,
)  # fmt: skip
SIZES = st.sampled_from((0, 1, 2, 15, 16, 63, 64, 127, 129, 256, 1000, 4096, 128_256))


def head(tokens: int, width: int, vocabulary: int, dtype: torch.dtype = BF16) -> LoopWork:
    """An LM head: logits, the gradient of its input, that of its weight, and the loss."""
    n, d, v = tokens, width, vocabulary
    sizes = (((n, d, v), ROWS), ((n, v, d), ROWS), ((v, n, d), CONTRACTED))
    products = tuple(
        TokenProduct(Product(*size, dtype=dtype, result_bytes=dtype.itemsize), tokens_in)
        for size, tokens_in in sizes
    )
    moved_bytes = 2 * n * v * dtype.itemsize  # logits are read once, their gradient written once
    return LoopWork(n, products, computed_bytes=moved_bytes, moved_bytes=moved_bytes, kernels=5)


# ---- figures that are known --------------------------------------------------------------------
def test_a_large_head_takes_as_long_as_others_measured() -> None:
    """25.8 TFLOP on an H200 that reaches about 790 TFLOP/s: 33 to 37 ms."""
    work = head(8192, 4096, 128_256)
    assert work.operations == pytest.approx(25.8e12, rel=0.01)
    assert 33e3 <= H200.whole_us(work) <= 37e3
    assert H200.rate(BF16) == pytest.approx(790e6, rel=0.01)


def test_launches_hide_behind_a_chunk_of_a_large_head() -> None:
    work = head(8192, 4096, 128_256)
    each = [H200.product_us(p.of_chunk(1024)) for p in work.products]
    assert min(each) >= 1100, "three products of 1.1 ms each"
    host_us = gpu_costs.HOST_CHUNK_US + work.kernels * gpu_costs.HOST_KERNEL_US
    assert H200.chunk_us(work, 1024) > 20 * host_us
    assert H200.relative_time(work, 4096) <= GOOD


# Time in chunks of so many rows / time in one piece: of three products of 16,384 tokens, d=2048,
# V=32768, and of a step of a head of d=4096, V=128256 (docs/results/gpu.md, H200).
MEASURED_PRODUCTS = {128: 4.49, 256: 2.48, 512: 1.61, 1024: 1.24, 2048: 1.08, 4096: 1.03}
MEASURED_HEADS = {(8192, 512): 1.45, (8192, 1024): 1.21, (8192, 2048): 1.11, (8192, 4096): 1.04,
                  (32_768, 6560): 1.01}  # fmt: skip


@pytest.mark.parametrize("rows", MEASURED_PRODUCTS)
def test_products_in_chunks_are_as_slow_as_an_h200_was(rows: int) -> None:
    work = dataclasses.replace(head(16_384, 2048, 32_768), moved_bytes=0.0, kernels=3)
    assert H200.slowdown(work, rows) == pytest.approx(MEASURED_PRODUCTS[rows], rel=0.15)


@pytest.mark.parametrize(("tokens", "rows"), MEASURED_HEADS)
def test_heads_in_chunks_are_as_slow_as_on_an_h200(tokens: int, rows: int) -> None:
    work = head(tokens, 4096, 128_256)
    estimated = H200.loop_us(work, rows) / H200.whole_us(work)
    assert estimated == pytest.approx(MEASURED_HEADS[tokens, rows], rel=0.15)


def test_the_host_takes_as_long_for_a_chunk_as_that_of_an_h200_did() -> None:
    """Of a tiny head: three products, and two kernels of the loss."""
    assert H200.chunk_us(head(4096, 16, 64), 64) == pytest.approx(143.5, rel=0.15)


# Milliseconds of a layer's attention, bf16, 32 heads of 128, 16,384 tokens, seen by a profiler
# while the GPU was slower than at other times: its products ran at 598 TFLOP/s.
MEASURED_ATTENTION = {
    ("cudnn", False): 6.99, ("cudnn", True): 14.27,
    ("efficient", False): 38.36, ("efficient", True): 128.1,
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "backward"), MEASURED_ATTENTION)
def test_attention_is_as_fast_beside_products_as_on_an_h200(kernel: str, backward: bool) -> None:
    """cuDNN's kernel skips what the causal mask hides; the memory-efficient one reads a mask."""
    efficient, tokens, heads = kernel == "efficient", 16_384, 32
    operations = (10 if backward else 4) * heads * tokens**2 * 128
    work = AttentionWork(
        operations, BF16, heads, tokens, tokens, not efficient, backward, efficient=efficient
    )
    slower = H200.rate(BF16) / 598e6
    measured_us = 1e3 * MEASURED_ATTENTION[kernel, backward]
    assert slower * H200.attention_us(work, 0.0) == pytest.approx(measured_us, rel=0.15)


def test_products_of_older_gpus_are_nearer_to_memory_efficient_attention() -> None:
    work = AttentionWork(2**40, BF16, 32, 8192, 8192, efficient=True)
    shares = []
    for name in ("a100", "h100"):
        costs = GpuCosts(gpu(name))
        shares.append(work.operations / costs.rate(BF16) / costs.attention_us(work, 0.0))
    assert shares[0] == pytest.approx(2 * shares[1], rel=0.01)


def test_accumulators_make_short_chunks_slow() -> None:
    """Each chunk reads and writes V x d in float32: as long as the product at about 1,100 rows."""
    of_weight = head(8192, 4096, 128_256).products[2].of_chunk(512)
    read_and_written = (1 + 15 / 16) * 4 * 128_256 * 4096  # the first chunk only writes
    assert of_weight.moved_bytes == pytest.approx(read_and_written, rel=0.1)
    adding_us = read_and_written / (gpu_costs.ADDING * H200.gpu.memory_bytes_per_us)
    alone_us = H200.product_us(dataclasses.replace(of_weight, accumulates=0.0))
    assert adding_us > 1.5 * alone_us
    assert adding_us + 0.3 * alone_us < H200.product_us(of_weight) < adding_us + alone_us
    single = H200.slowdown(head(8192, 4096, 128_256, torch.float32), 512)
    assert single < 1.1 < H200.slowdown(head(8192, 4096, 128_256), 512)


# ---- tiles, waves, splits ----------------------------------------------------------------------
def test_rows_count_by_tiles() -> None:
    def us(rows: int) -> float:
        return COMPUTE.product_us(Product(rows, 4096, 128 * 256 * 8, dtype=BF16))

    assert us(129) == us(192), "the same tiles"
    assert us(129) == pytest.approx(us(256), rel=0.05), "tiles of 64 rows are slower for each row"
    assert us(193) == us(256)
    assert us(257) > 1.4 * us(256)


def test_a_last_wave_counts_in_full() -> None:
    """132 tiles of 256 x 128 fill an H100 once; one more row of tiles needs a second wave."""
    full, more = (Product(256 * n, 192, 128 * 12, dtype=BF16) for n in (11, 12))
    us = [COMPUTE.product_us(p) - KERNEL_US for p in (full, more)]
    assert us[1] > 1.3 * us[0]


def test_splits_of_the_contracted_dim_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(128, 65_536, 128, dtype=BF16)
    split_us = H100.product_us(product)
    gpu_costs._busy_us.cache_clear()
    monkeypatch.setattr(gpu_costs, "_MOST_SPLITS", 1)
    assert GpuCosts(gpu("h100")).product_us(product) > 5 * split_us
    gpu_costs._busy_us.cache_clear()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(GPUS)), st.sampled_from(DTYPES), SIZES, SIZES, SIZES, st.integers(1, 9),
    st.sampled_from(("rows", "columns", "batch")), st.integers(1, 300),
)  # fmt: skip
def test_more_work_never_takes_less_time(
    name: str, dtype: torch.dtype, m: int, k: int, n: int, b: int, size: str, more: int
) -> None:
    costs = GpuCosts(gpu(name))
    product = Product(m, k, n, b, dtype)
    larger = dataclasses.replace(product, **{size: getattr(product, size) + more})
    here, there = costs.product_us(product), costs.product_us(larger)
    assert KERNEL_US <= here <= there * (1 + 1e-9) < math.inf


@pytest.mark.parametrize("name", GPUS)
def test_smaller_dtypes_are_not_slower(name: str) -> None:
    exact, rounded = GpuCosts(gpu(name)), GpuCosts(gpu(name), tf32=True)
    rates = [rounded.rate(dtype) for dtype in (torch.float8_e5m2, torch.float16, torch.float32)]
    assert rates == sorted(rates, reverse=True)
    assert exact.rate(torch.float32) <= rounded.rate(torch.float32)
    assert exact.rate(torch.float64) < exact.rate(torch.float32) <= exact.rate(BF16)


# ---- loops -------------------------------------------------------------------------------------
def test_the_host_shows_where_the_gpu_is_faster() -> None:
    small = head(4096, 64, 1024)
    host_us = gpu_costs.HOST_CHUNK_US + small.kernels * gpu_costs.HOST_KERNEL_US
    assert H100.chunk_us(small, 512) == host_us
    assert H100.loop_us(small, 512) == 8 * host_us
    assert H100.chunk_us(head(8192, 4096, 128_256), 1024) > 10 * host_us


def test_an_overlapping_chunk_is_computed_in_full() -> None:
    work = head(8192, 1024, 128_256)
    assert H100.loop_us(work, 1024) == 8 * H100.chunk_us(work, 1024)
    assert H100.loop_us(work, 1040) == 8 * H100.chunk_us(work, 1040)
    assert H100.loop_us(work, 1008) == 9 * H100.chunk_us(work, 1008)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("limit", [1.05, 1.2, 2.0])
def test_least_rows_are_aligned_and_keep_the_limit(name: str, limit: float) -> None:
    costs, work = GpuCosts(gpu(name)), head(16_384, 2048, 50_257)
    for relative in (costs.relative_time, costs.slowdown):
        rows = least_rows(relative, work, limit)
        assert rows % GRAIN == 0
        assert relative(work, rows) <= limit
        for shorter in itertools.islice(gpu_costs._lengths(), 200):
            assert shorter >= rows or relative(work, shorter) > limit


def test_work_that_is_never_fast_enough_gets_all_tokens() -> None:
    assert least_rows(H100.relative_time, head(512, 16, 32), 1.05) >= 512
    assert least_rows(H100.relative_time, LoopWork(512, (), moved_bytes=100.0), 1.05) >= 512
    assert H100.loop_us(LoopWork(1, ()), 16) > 0


@pytest.mark.parametrize("tokens_in", [BATCH, ROWS, COLUMNS, CONTRACTED])
def test_a_chunk_of_a_product(tokens_in: str) -> None:
    whole = TokenProduct(Product(4096, 4096, 4096, 4096, BF16, 2), tokens_in)
    chunk = whole.of_chunk(1024)
    assert chunk.operations == whole.whole.operations // 4
    summed = tokens_in == CONTRACTED
    assert (chunk.accumulates, chunk.result_bytes) == ((0.75, 4) if summed else (0.0, 2))
    assert whole.over(8192).whole.operations == 2 * whole.whole.operations


# ---- measured ----------------------------------------------------------------------------------
def test_measurements_take_the_place_of_estimates() -> None:
    table = ChunkCosts(
        ((256, 1.9), (1024, 1.1)), 90.0, 500e6, "bfloat16", (("float16", 450e6),), 1.2e6
    )
    costs, work = MeasuredGpuCosts.of(gpu("h100"), False, table), head(8192, 4096, 128_256)
    assert costs.rate(BF16) == pytest.approx(500e6)
    assert costs.rate(torch.float16) == 450e6
    assert costs.rate(torch.float32) == pytest.approx(66.9e6 * 500 / 989.4)
    assert costs.memory_us(2.4e6) == pytest.approx(1.0), "a copy reads and writes"
    assert costs.whole_us(work) == pytest.approx(25.8e12 / 500e6, rel=0.07)
    assert costs.slowdown(work, 1024) == pytest.approx(1.1)
    assert costs.loop_us(work, 1024) == pytest.approx(1.1 * costs.whole_us(work))
    assert costs.loop_us(work, 1040) == pytest.approx(
        8320 / 8192 * costs.relative_time(work, 1040) * costs.whole_us(work)
    )
    small = head(4096, 64, 1024)
    assert costs.loop_us(small, 512) == pytest.approx(8 * 90.0)
    single = dataclasses.replace(work, products=head(8192, 4096, 128_256, torch.float32).products)
    assert costs.slowdown(single, 256) < 1.2, "where products are slow, accumulators weigh less"


# ---- the page ----------------------------------------------------------------------------------
def documented(name: str) -> str:
    """The row of a GPU in docs/costs.md."""
    kind = GPUS[name]
    dtype = BF16 if BF16 in kind.flops_per_us else torch.float16
    costs, work = GpuCosts(kind), head(8192, 4096, 128_256, dtype)
    peak = f"{kind.flops_per_us[dtype] / 1e6:.0f}" + ("" if dtype == BF16 else " (fp16)")
    slower = (f"{costs.relative_time(work, rows):.2f}x" for rows in (512, 1024, 2048))
    whole_ms, least = costs.whole_us(work) / 1e3, least_rows(costs.slowdown, work, 1.2)
    bandwidth = f"{kind.memory_bytes_per_us / 1e3:.0f}"
    return f"| {' | '.join([name, peak, bandwidth, f'{whole_ms:.1f}', *slower, str(least)])} |"


@pytest.mark.parametrize("name", GPUS)
def test_the_page_of_costs_shows_what_the_model_says(name: str) -> None:
    page = Path(__file__).parent.parent / "docs" / "costs.md"
    assert documented(name) in page.read_text(encoding="utf-8").splitlines()
