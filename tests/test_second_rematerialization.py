"""Cheap values are computed once more after the peak, if that lowers the peak."""

from __future__ import annotations

import pytest
import torch

import mstpass
from mstpass import pipeline, pipeline_stages
from mstpass.bench.models import LlamaSize, llama
from mstpass.loops import attention_modes
from mstpass.measure import peak_bytes
from mstpass.options import Options
from mstpass.schedule.delay_recomputation import copy_waits
from mstpass.schedule.second_rematerialization import add_second_rematerialization
from tests.checks import compiled, joint_graph

SIZE = LlamaSize(64, 2, 2, 96, 1024, 1024)  # the step peaks in attention


def _step(size: LlamaSize, **options: object) -> tuple[pipeline.Result, int]:
    model, ids, target = llama(size, torch.device("cpu"))
    joint, outputs = joint_graph(lambda ids, target: model(ids, target), ids, target)
    given = Options.parse({"reconstruct": "off", **options})
    result = pipeline.run(joint, given, num_fwd_outputs=outputs)
    assert result.modules is not None
    peak = result.outcome.peak_bytes
    assert peak is not None
    return result, peak


def test_a_norm_is_computed_again_after_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_modes, "attention_candidates", lambda *_: ([], []))
    result, peak = _step(SIZE, memory_budget=0.0)
    monkeypatch.setattr(
        pipeline_stages,
        "add_second_rematerialization",
        lambda modules, memory, _: (modules, memory),
    )
    once, higher = _step(SIZE, memory_budget=0.0)
    value = SIZE.length * SIZE.width * 4
    assert peak <= higher - value
    assert result.modules is not None and once.modules is not None
    graph = result.modules[1].graph
    assert len(graph.nodes) > len(once.modules[1].graph.nodes)
    order = {node: i for i, node in enumerate(graph.nodes)}
    waits = copy_waits(graph)
    assert waits and copy_waits(once.modules[1].graph) == {}
    for node, before in waits.items():
        assert all(order[other] < order[node] for other in before)


def test_a_budget_that_is_met_needs_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a plan within its budget was rewritten")

    monkeypatch.setattr(pipeline_stages, "add_second_rematerialization", never)
    _step(SIZE)
    _step(SIZE, memory_budget=0.4)


def test_copies_that_lower_nothing_are_removed() -> None:
    """The step peaks at the logits, so the modules come back as they were."""
    size = LlamaSize(32, 1, 2, 64, 2048, 128)
    result, _ = _step(size, chunk="off")
    assert result.modules is not None
    memory = pipeline_stages.simulate_step(*(module.graph for module in result.modules))
    modules, after = add_second_rematerialization(result.modules, memory, scatters_delayed=False)
    assert modules is result.modules and after is memory


@pytest.mark.full
def test_the_measured_peak_is_the_simulated_one() -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    step = compiled(lambda ids, target: model(ids, target), memory_budget=0.0)

    def run() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        step(ids, target).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    ours = [gradient.clone() for gradient in run()]
    model.zero_grad(set_to_none=True)
    simulated = mstpass.reports()[-1].peak_bytes
    assert simulated is not None
    assert 0.95 * simulated <= peak_bytes(run) <= 1.02 * simulated
    model.zero_grad(set_to_none=True)
    model(ids, target).backward()
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
