"""Chunk lengths on a GPU that is not there: aligned, equal where possible, never too short."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from mstpass import pipeline
from mstpass.gpus import GPUS, gpu
from mstpass.graph.call_work import moved_bytes
from mstpass.graph.device_costs import _CPU, GOOD, Costs, _cpu_costs
from mstpass.graph.gpu_costs import GpuCosts, least_rows
from mstpass.graph.joint import JointGraph
from mstpass.graph.loop_work import product_of
from mstpass.loops.chunk_length import _equal_chunks, _rows
from mstpass.options import Options
from mstpass.planner.traced_step import _move_to_gpu
from tests.checks import joint_graph
from tests.test_gpu_costs import head


def planned(
    tokens: int,
    width: int = 1024,
    vocabulary: int = 128_256,
    dtype: torch.dtype = torch.bfloat16,
    dynamic: bool | None = None,
) -> pipeline.Result:
    """The plan of a head for an H100. The operands are reserved, never written."""
    hidden, weight = (torch.empty(n, width, dtype=dtype) for n in (tokens, vocabulary))
    target = torch.zeros(tokens, dtype=torch.long)
    operands = [t.requires_grad_() for t in (hidden, weight)]
    joint, outputs = joint_graph(
        lambda h, w: F.cross_entropy((h @ w.t()).float(), target), *operands, dynamic=dynamic
    )
    _move_to_gpu(joint)
    options = Options(free_overhead=1.0)  # heads in float16 recompute
    return pipeline.run(joint, options, num_fwd_outputs=outputs, stop_after="plan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [4096, 4098, 8190, 8192, 10_000])
def test_lengths_are_multiples_of_16(tokens: int, dtype: torch.dtype) -> None:
    (region,) = planned(tokens, dtype=dtype).outcome.regions
    assert region.chunk_tokens % 16 == 0
    assert region.num_chunks == math.ceil(tokens / region.chunk_tokens)
    equal = region.chunk_tokens * region.num_chunks == tokens
    assert equal == (tokens in (4096, 8192)), "chunks overlap only where they must"


def test_a_large_head_runs_in_chunks_that_hide_its_accumulator() -> None:
    """Those of 4,096 rows take at most 1.05 times as long as the whole on an H100; 2,048 do not."""
    for tokens, count in ((8192, 2), (32_768, 8)):
        (region,) = planned(tokens).outcome.regions
        assert (region.chunk_tokens, region.num_chunks) == (4096, count)


def test_a_symbolic_length_is_chosen_for_long_batches() -> None:
    hidden = torch.empty(2048, 1024, dtype=torch.bfloat16).requires_grad_()
    weight = torch.empty(128_256, 1024, dtype=torch.bfloat16).requires_grad_()
    target = torch.zeros(2048, dtype=torch.long)
    torch._dynamo.mark_dynamic(hidden, 0)
    torch._dynamo.mark_dynamic(target, 0)
    joint, outputs = joint_graph(
        lambda h, w, t: F.cross_entropy((h @ w.t()).float(), t), hidden, weight, target
    )
    _move_to_gpu(joint)
    result = pipeline.run(joint, Options(), num_fwd_outputs=outputs, stop_after="plan")
    (region,) = result.outcome.regions
    assert region.symbolic and region.chunk_tokens % 16 == 0
    assert 2048 <= region.chunk_tokens <= 4096


def test_too_few_tokens_are_refused_by_name() -> None:
    (rejection,) = planned(256).outcome.rejections
    assert "fewer than two chunks" in rejection.reason and "on cuda" in rejection.reason


def test_a_fused_head_reads_its_logits_once_and_writes_their_gradient_once() -> None:
    hidden, weight = (torch.empty(n, 64, dtype=torch.bfloat16) for n in (4096, 8192))
    target = torch.zeros(4096, dtype=torch.long)
    module, outputs = joint_graph(
        lambda h, w: F.cross_entropy((h @ w.t()).float(), target),
        hidden.requires_grad_(), weight.requires_grad_(),
    )  # fmt: skip
    joint = JointGraph(module, outputs)
    others = [node for node in joint.nodes if product_of(node) is None]
    moved = sum(moved_bytes(joint, node) for node in others)
    assert moved == pytest.approx(2 * 4096 * 8192 * 2, rel=0.01)


COSTS: list[Costs] = [_cpu_costs(_CPU, 2), *map(GpuCosts, map(gpu, sorted(GPUS)))]


@given(st.sampled_from(COSTS), st.integers(2, 200_000), st.integers(2, 64))
@example(COSTS[0], 66, 2)  # two chunks of fewer rows than products should have
def test_chunks_of_any_count_cover_the_tokens(costs: Costs, tokens: int, num_chunks: int) -> None:
    work = head(max(tokens, 32 * num_chunks), 512, 32_000)
    fewest = least_rows(costs.slowdown, work, costs.tolerable)
    rows = _equal_chunks(num_chunks, work, costs, fewest)
    assert 1 <= rows <= work.tokens
    assert rows % costs.grain == 0
    chunks = math.ceil(work.tokens / rows)
    assert chunks <= max(num_chunks * 4 // 3, num_chunks)
    if work.tokens % num_chunks == 0 and (work.tokens // num_chunks) % costs.grain == 0:
        assert work.tokens % rows == 0, "equal chunks stay equal"


def test_on_a_cpu_overlapping_chunks_are_aligned_and_equal_ones_stay() -> None:
    costs = _cpu_costs(_CPU, 2)
    assert _equal_chunks(8, head(2000, 512, 32_000), costs, 240) == 250, "equal"
    assert _equal_chunks(4, head(1999, 512, 32_000), costs, 400) == 512, "500 would overlap, too"
    assert _equal_chunks(7, head(700, 512, 32_000), costs, 16) == 100
    assert _equal_chunks(100, head(1999, 512, 32_000), costs, 16) == 20, "32 would be 63 chunks"
    assert _rows(1000, 3, 16) == 336
    assert GOOD > 1
