"""A region stays whole if its loops would not lower the peak of the step, and only then."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass import pipeline
from mstpass.bench.models import LlamaSize, llama
from mstpass.graph.tokens import Refusal
from mstpass.loops.plan_region import RegionPlanner
from mstpass.memory.simulate_plan import step_memory
from mstpass.options import Options
from mstpass.partition.solvers.free_plan import every_saving
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.problem.apply_modes import with_modes
from mstpass.report.data import asks_for_change
from tests.checks import joint_graph

pytestmark = pytest.mark.op_by_op

HEAVY_HEAD = LlamaSize(256, 4, 4, 1024, 16_000, 2048)
LIGHT_HEAD = LlamaSize(256, 4, 4, 1024, 1000, 2048)


@functools.cache
def _run(size: LlamaSize, **options: Any) -> pipeline.Result:
    model, ids, target = llama(size, torch.device("cpu"))
    joint, outputs = joint_graph(lambda ids, target: model(ids, target), ids, target)
    return pipeline.run(joint, Options(**options), num_fwd_outputs=outputs)


def _mlps(result: pipeline.Result) -> list[str]:
    return [p.mode for p in result.outcome.regions if p.kind == "mlp"]


@pytest.mark.parametrize("size", [HEAVY_HEAD, LIGHT_HEAD])
def test_no_peak_rises_by_what_is_left_out(size: LlamaSize) -> None:
    """Before the time that all loops take together is bounded."""
    problem = _run(size).problem
    assert problem is not None
    everything = with_modes(problem, {})
    with_all_loops = step_memory(everything, min_cut(everything))
    found = every_saving(problem)
    assert found.peak_bytes <= 1.01 * with_all_loops.peak_bytes
    assert ("whole" not in found.plan.modes.values()) == (size is LIGHT_HEAD)


def test_under_a_heavy_head_mlps_need_no_loops() -> None:
    result = _run(HEAVY_HEAD, free_overhead=0.02)
    assert "save" not in _mlps(result)
    reasons = [r.reason for r in result.outcome.rejections]
    told = "take too long without a budget"  # loops that recompute would help
    assert reasons and all(told in r or "the step's peak lies elsewhere" in r for r in reasons)


@pytest.mark.parametrize("budget", ["free", 0.0])
def test_a_head_whose_sums_are_larger_than_its_logits_says_so(
    budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """d=1024, V=2048 in bfloat16: 1,024 tokens' logits take 4 MiB, the sums in float32 8 MiB.

    Sections of the vocabulary need no sums: here there are none.
    """
    monkeypatch.setattr(RegionPlanner, "sections", Refusal("none here"))
    weight = torch.zeros(2048, 1024, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.zeros(1024, 1024, dtype=torch.bfloat16, requires_grad=True)

    def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels)

    joint, outputs = joint_graph(loss, hidden, torch.zeros(1024, dtype=torch.long))
    options = Options(memory_budget=budget, accumulate="float32")
    result = pipeline.run(joint, options, num_fwd_outputs=outputs)
    (rejection,) = result.outcome.rejections
    told = re.search(r"raise the step's peak, from ([\d.]+) MiB to ([\d.]+) MiB", rejection.reason)
    assert told is not None and float(told[1]) < float(told[2])
    assert "memory_budget" not in rejection.fix


def test_loops_that_take_too_long_say_so() -> None:
    """In float16 a head is computed again in the backward: a third of its products more."""
    weight = torch.zeros(8192, 256, dtype=torch.float16, requires_grad=True)
    hidden = torch.zeros(2048, 256, dtype=torch.float16, requires_grad=True)

    def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels)

    joint, outputs = joint_graph(loss, hidden, torch.zeros(2048, dtype=torch.long))
    told = pipeline.run(joint, Options(), num_fwd_outputs=outputs).outcome
    (rejection,) = told.rejections
    assert "take too long without a budget" in rejection.reason
    assert "memory_budget" in rejection.fix
    much = pipeline.run(joint, Options(free_overhead=1.0), num_fwd_outputs=outputs).outcome
    assert [p.kind for p in much.regions] == ["lm_head"]


def test_what_a_budget_would_take_asks_for_one() -> None:
    """Of three heads the smallest stays whole: alone it would not lower the peak, with all it does.

    The plan under a budget takes no more time than Inductor, at half of the free plan's peak.
    """
    sizes = 8000, 4000, 1000
    weights = [torch.zeros(words, 64, requires_grad=True, device="meta") for words in sizes]
    hidden = torch.zeros(2048, 64, requires_grad=True, device="meta")
    labels = torch.zeros(2048, dtype=torch.long, device="meta")

    def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return sum(F.cross_entropy(hidden @ weight.t(), labels) for weight in weights)

    free, less = (
        mstpass.explain(loss, hidden, labels, options={"memory_budget": budget})
        for budget in ("free", 0.3)
    )
    (rejection,) = free.rejections
    told = re.search(r"under a memory_budget .* lower it, to ([\d.]+) MiB", rejection.reason)
    assert told is not None and float(told[1]) == pytest.approx(less.peak_bytes / 2**20, rel=0.05)
    assert less.peak_bytes < 0.6 * free.peak_bytes and less.extra_time < 0.02
    assert rejection.fix.startswith("set a memory_budget") and asks_for_change(rejection, free)
    assert "does not run in chunks:" in str(free)


def test_where_an_mlp_makes_the_peak_it_keeps_its_loop() -> None:
    assert "save" in _mlps(_run(LIGHT_HEAD))


def test_a_forced_length_is_obeyed() -> None:
    result = _run(HEAVY_HEAD, chunk_tokens=512)
    assert len(_mlps(result)) == HEAVY_HEAD.layers and not result.outcome.rejections


def test_symbolic_batches_keep_their_loops() -> None:
    model, ids, target = llama(dataclasses.replace(HEAVY_HEAD, layers=2), torch.device("cpu"))
    joint, outputs = joint_graph(
        lambda ids, target: model(ids, target), ids[:, :-7], target[:, :-7], dynamic=True
    )
    result = pipeline.run(joint, Options(), num_fwd_outputs=outputs)
    assert not any("elsewhere" in r.reason for r in result.outcome.rejections)
    assert result.problem is not None
    assert all(mode.loops for region in result.problem.regions for mode in region.modes)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_peak_is_told_where_a_size_that_depends_on_data_has_a_bound(is_known: bool) -> None:
    """Rows that a mask selects are at most all; a number in the data may be any."""
    weight = torch.randn(64, 16, requires_grad=True)

    def selected(x: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        return (x[rows] @ weight.t()).sin().sum()

    def repeated(x: torch.Tensor) -> torch.Tensor:
        times = (x.detach() > 0).sum().item()
        return (x.new_ones(times, 16) * x[:1] @ weight.t()).sin().sum()

    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        x = torch.randn(300, 16, requires_grad=True)
        joint, outputs = joint_graph(selected if is_known else repeated, x)
    outcome = pipeline.run(joint, Options(), num_fwd_outputs=outputs).outcome
    assert (outcome.peak_bytes is not None) == is_known
