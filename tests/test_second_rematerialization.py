"""Cheap values are computed once more after the peak, if that lowers the peak."""

from __future__ import annotations

import pytest
import torch

import mstpass
from mstpass import pipeline
from mstpass.bench.models import LlamaSize, llama
from mstpass.loops import candidate_modes
from mstpass.measure import peak_bytes
from mstpass.memory.repeated_values import repeated_values
from mstpass.memory.simulate_graph import step_ops
from mstpass.memory.simulate_ops import StepMemory
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.options import Options
from mstpass.schedule.delay_recomputation import copy_waits
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
    monkeypatch.setattr(candidate_modes, "attention_candidates", lambda *_: ([], []))
    result, peak = _step(SIZE, memory_budget=0.0)
    monkeypatch.setattr(StepSimulation, "lowered_program", StepSimulation.program)
    once, higher = _step(SIZE, memory_budget=0.0)
    value = SIZE.length * SIZE.width * 4
    assert peak <= higher - value // 2  # without copies, other values are saved
    assert result.modules is not None and once.modules is not None
    graph = result.modules[1].graph
    assert len(graph.nodes) > len(once.modules[1].graph.nodes)
    order = {node: i for i, node in enumerate(graph.nodes)}
    waits = copy_waits(graph)
    assert waits and copy_waits(once.modules[1].graph) == {}
    for node, before in waits.items():
        assert all(order[other] < order[node] for other in before)


def test_a_budget_that_is_met_needs_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: object) -> None:
        raise AssertionError("a plan within its budget was rewritten")

    monkeypatch.setattr(StepSimulation, "lowered_program", property(never))
    _step(SIZE)
    _step(SIZE, memory_budget=0.4)


def test_copies_that_lower_nothing_are_not_made() -> None:
    """The step peaks at the logits, so the ops come back as they were."""
    size = LlamaSize(32, 1, 2, 64, 2048, 128)
    result, _ = _step(size, chunk="off")
    assert result.modules is not None
    forward, backward, _ = step_ops(*(module.graph for module in result.modules))
    memory = StepMemory(forward.simulated(), backward.simulated())
    repeated = repeated_values(memory, backward, {op.name for op in backward.ops})
    assert repeated.backward is backward and repeated.memory is memory


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
