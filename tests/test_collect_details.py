"""What pictures are drawn from: it must be the plan's own numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

from mstpass import pipeline
from mstpass.bench.models import Llama, LlamaSize
from mstpass.options import Options
from mstpass.report.collect_details import collect_details
from mstpass.report.details import BACKWARD, FATES, Details, MemoryTimeline
from mstpass.tracing.joint_graphs import trace_joint

SIZE = LlamaSize(width=64, layers=2, heads=2, mlp_width=256, vocabulary=2048, length=1024)


def planned(**options: Any) -> pipeline.Result:
    model = Llama(SIZE)
    ids, target = torch.zeros(2, SIZE.batch, SIZE.length, dtype=torch.long)

    def take(module: fx.GraphModule, num_fwd_outputs: int) -> pipeline.Result:
        return pipeline.run(module, Options.parse(options), num_fwd_outputs=num_fwd_outputs)

    return trace_joint(model, (ids, target), take)


def check_bytes(timeline: MemoryTimeline) -> None:
    """At each moment the bytes are the sum over the lives that contain it."""
    assert len(timeline.moments) == len(timeline.bytes) and len(timeline.bytes) > 30
    for moment, size in enumerate(timeline.bytes):
        assert sum(life.bytes for life in timeline.alive_at(moment)) == size, moment


@pytest.fixture(scope="module")
def free() -> pipeline.Result:
    torch.compiler.reset()
    return planned()


@pytest.fixture(scope="module")
def details(free: pipeline.Result) -> Details:
    found = collect_details(free)
    assert found is not None
    return found


def test_timelines_are_the_reported_memory(free: pipeline.Result, details: Details) -> None:
    assert details.before is not None and details.after is not None
    check_bytes(details.before)
    check_bytes(details.after)
    assert details.before.peak_bytes == free.outcome.baseline_peak_bytes
    assert details.after.peak_bytes == free.outcome.peak_bytes


def test_a_budget_s_timeline(free: pipeline.Result) -> None:
    result = planned(memory_budget=0.0)
    details = collect_details(result)
    assert details is not None and details.after is not None
    check_bytes(details.after)
    assert details.after.peak_bytes == result.outcome.peak_bytes
    fates = Counter(node.fate for node in details.nodes)
    assert fates["recomputed"] > 20 and fates["saved"] > 3


def test_nodes_have_places_fates_and_regions(free: pipeline.Result, details: Details) -> None:
    by_name = {node.name: node for node in details.nodes}
    for node in details.nodes:
        assert set(node.inputs) <= by_name.keys() and node.fate in FATES
        assert node.module or not node.bytes or node.op == "input" or "norm" not in node.op
    heads = [node for node in details.nodes if node.op in ("mm", "addmm") and node.module == "head"]
    assert {node.phase for node in heads} == {"forward", "backward"}
    assert all(node.source.startswith("models.py:") for node in heads)
    assert {free.outcome.regions[node.region].kind for node in heads} == {"lm_head"}
    products = [n for n in details.nodes if n.op == "mm" and n.phase == BACKWARD]
    assert products and all(node.module for node in products)


def test_what_crosses_is_drawn_as_saved(free: pipeline.Result, details: Details) -> None:
    plan = free.outcome.save_plan
    assert plan is not None
    saved = [node for node in details.nodes if node.fate == "saved"]
    known = sum(node.bytes for node in saved)
    assert 0.9 * plan.saved_bytes <= known <= 1.1 * plan.saved_bytes


def test_loops_run_in_the_planned_timeline_alone(details: Details) -> None:
    assert details.before is not None and details.after is not None
    loops = [name for name in details.after.moments if name.startswith("loop:")]
    nodes = {node.name: node for node in details.nodes}
    assert loops and all(nodes[name.removeprefix("loop:")].region >= 0 for name in loops)
    assert not any(name.startswith("loop:") for name in details.before.moments)
    assert {life.node for life in details.after.lives if life.transient} >= set(loops)
    known = sum(life.node in nodes or life.node in loops for life in details.after.lives)
    assert known >= 0.9 * len(details.after.lives)
