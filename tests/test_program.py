"""A step's program: what is simulated of it is what the graphs that are written from it need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from mstpass import pipeline_stages
from mstpass.bench.models import LlamaSize, llama
from mstpass.graph.builder import ADDED
from mstpass.graph.joint import JointGraph, Modules
from mstpass.graph.node_meta import original_name
from mstpass.graph.own_ops import REALIZE
from mstpass.memory.program import Program
from mstpass.memory.simulate_graph import kind_of, simulate_step
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.options import Options
from mstpass.partition.split import split_joint
from mstpass.pipeline import run
from mstpass.plans import SavePlan
from mstpass.problem.op import INPUT, ITEM, SIZE
from mstpass.problem.problem import Plan, Value
from tests.checks import joint_graph
from tests.models import MLPS, Attention, Block

pytestmark = pytest.mark.sampled(3)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepSimulation, Program, Modules]]:
    """The steps that the pipeline has written, with their programs and graphs."""
    steps: list[StepSimulation] = []
    found: list[tuple[StepSimulation, Program, Modules]] = []
    program_of = pipeline_stages.Planned.program_of

    def of_step(planned: pipeline_stages.Planned, step: StepSimulation) -> Program:
        steps.append(step)
        return program_of(planned, step)

    def recorded(
        joint: JointGraph, program: Program, plan: Plan, solver: str, **torch_kwargs: Any
    ) -> tuple[Modules, SavePlan]:
        modules, save_plan = split_joint(joint, program, plan, solver, **torch_kwargs)
        found.append((steps[-1], program, modules))
        return modules, save_plan

    monkeypatch.setattr(pipeline_stages.Planned, "program_of", of_step)
    monkeypatch.setattr(pipeline_stages, "split_joint", recorded)
    return found


def _blocks() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    parts = [Attention(16, 2) if i % 2 else MLPS["gelu"](16) for i in range(10)]
    model = nn.Sequential(*(Block(16, part) for part in parts))
    return model, torch.randn(1, 1024, 16, requires_grad=True)


@pytest.mark.parametrize("chunk", ["auto", "off"])
@pytest.mark.parametrize("budget", ["free", 0.3, 0.0])
@pytest.mark.parametrize("model", ["blocks", "llama"])
def test_the_graphs_are_the_program(
    model: str, budget: str | float, chunk: str, written: list[Any]
) -> None:
    if model == "blocks":
        module, x = _blocks()
        joint, outputs = joint_graph(lambda x: module(x).sin().sum(), x)
    else:
        module, *batch = llama(LlamaSize(64, 2, 2, 96, 1024, 1024), torch.device("cpu"))
        joint, outputs = joint_graph(lambda ids, target: module(ids, target), *batch)
    run(joint, Options(memory_budget=budget, chunk=chunk), num_fwd_outputs=outputs)
    assert written
    for step, program, graphs in written:
        for ops, graph in zip((program.forward, program.backward), graphs, strict=True):
            items = {op.node_name for op in ops if op.kind == ITEM}
            assert _ran(ops) == [name for name in _called(graph) if name not in items]
        forward, backward = (each.graph for each in graphs)
        memory = simulate_step(forward, backward, scatters_delayed=True)
        lowered = program is not step.program
        peak_bytes = step.lowered_peak_bytes if lowered else step.peak_bytes
        assert memory.peak_bytes == peak_bytes


def test_what_a_fused_loop_reads_at_one_is_simulated_as_written(written: list[Any]) -> None:
    """Of logits twice as many as labels, the gradient is made before the loop over features: in
    kernels that hold none of the large values that they read."""
    head, hidden = nn.Linear(24, 601, bias=False), torch.randn(4, 61, 24, requires_grad=True)
    targets = torch.randint(601, (4, 122))

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.interpolate(head(hidden).transpose(1, 2), scale_factor=2.0)
        return nn.functional.cross_entropy(logits, targets)

    joint, outputs = joint_graph(loss, hidden)
    result = run(joint, Options(memory_budget=0.0, chunk_tokens=8), num_fwd_outputs=outputs)
    assert [region.mode for region in result.outcome.regions] == ["fused"]
    assert result.outcome.peak_bytes == written[-1][0].peak_bytes


def _ran(ops: tuple[Value, ...]) -> list[str]:
    """The nodes that ops run, in order, but for items, which follow their calls."""
    return [op.node_name for op in ops if op.kind not in (INPUT, SIZE, ITEM)]


def _called(module: fx.GraphModule) -> list[str]:
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not REALIZE]
    names = [original_name(n.name) for n in nodes if kind_of(n) not in (ITEM, SIZE)]
    return [name for name in names if not name.startswith(ADDED)]  # they prepare operands
