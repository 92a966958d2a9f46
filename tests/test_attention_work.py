"""What attention costs: hidden scores, and threads that wait for others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mstpass.gpus import gpu
from mstpass.graph.call_work import AttentionWork, attention_work
from mstpass.graph.device_costs import costs_of
from mstpass.graph.gpu_costs import GpuCosts
from mstpass.graph.measured_costs import ChunkCosts, MeasuredCosts
from tests.checks import joint_graph

LENGTH, FEATURES = 8192, 64
FORWARD = AttentionWork(
    4 * LENGTH**2 * FEATURES, torch.float32, heads=1, queries=LENGTH, keys=LENGTH, causal=True
)
BACKWARD = dataclasses.replace(FORWARD, operations=5 * FORWARD.operations // 2, backward=True)


def of_heads(work: AttentionWork, heads: int) -> AttentionWork:
    return dataclasses.replace(work, operations=heads * work.operations, heads=heads)


# Milliseconds for each head, with two threads of an AMD EPYC, torch 2.13, 2026-11-25.
@pytest.mark.parametrize(
    ("work", "heads", "measured_ms"),
    [
        (FORWARD, 1, 83),
        (FORWARD, 2, 58),
        (FORWARD, 3, 67),
        (FORWARD, 8, 58),
        (BACKWARD, 1, 252),
        (BACKWARD, 2, 155),
        (BACKWARD, 3, 199),
        (BACKWARD, 8, 154),
    ],
)
def test_times_are_near_those_measured(work: AttentionWork, heads: int, measured_ms: int) -> None:
    costs = MeasuredCosts(ChunkCosts(((512, 1.0),), 600.0, 160_000.0), 1e4, threads=2)
    estimated_ms = costs.attention_us(of_heads(work, heads), 0.0) / 1e3 / heads
    assert estimated_ms == pytest.approx(measured_ms, rel=0.15)


@given(
    st.integers(0, 70),
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
)
def test_no_thread_does_less_than_its_share_or_more_than_all(
    heads: int, queries: int, keys: int, threads: int, causal: bool, backward: bool
) -> None:
    operations = heads * queries * keys
    work = AttentionWork(operations, torch.float32, heads, queries, keys, causal, backward)
    assert 0 <= work.computed <= operations
    assert operations == 0 or 1 - 1e-9 <= work.imbalance(threads) <= threads + 1e-9


@pytest.mark.parametrize("work", [FORWARD, BACKWARD])
def test_groups_of_a_head_for_each_thread_cost_nothing(work: AttentionWork) -> None:
    eight = of_heads(work, 8)
    assert eight.of_group(4).imbalance(2) == eight.imbalance(2) == 1
    assert eight.of_group(8).imbalance(2) > 1.4


def test_a_few_short_heads_leave_multiprocessors_of_a_gpu_idle() -> None:
    costs = GpuCosts(gpu("h100"))
    short = AttentionWork(2**34, torch.bfloat16, heads=32, queries=1024, keys=1024)
    long = dataclasses.replace(short, queries=2**16, keys=2**16)
    groups_us = [8 * costs.attention_us(work.of_group(8), 0.0) for work in (short, long)]
    whole_us = [costs.attention_us(work, 0.0) for work in (short, long)]
    assert groups_us[0] > 2 * whole_us[0]
    assert groups_us[1] < 1.5 * whole_us[1]


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_read_from_a_graph(causal: bool) -> None:
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    k, v = (torch.randn(2, 3, 6, 4, requires_grad=True) for _ in range(2))
    graph_module, _ = joint_graph(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum(), q, k, v
    )
    forward, backward = filter(None, map(attention_work, graph_module.graph.nodes))
    assert forward == AttentionWork(4 * 6 * 8 * 6 * 4, torch.float32, 6, 8, 6, causal)
    expected = AttentionWork(10 * 6 * 8 * 6 * 4, torch.float32, 6, 8, 6, causal, backward=True)
    assert backward == expected
    assert costs_of(torch.device("cpu")).attention_us(forward, 0.0) > 0
