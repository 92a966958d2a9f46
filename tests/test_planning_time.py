"""Planning takes time in proportion to the graph, not to its square."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mstpass import pipeline
from mstpass.bench.models import LlamaSize, llama
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph
from mstpass.loops import mode_costs
from mstpass.loops.body.build import build_body
from mstpass.options import Options
from mstpass.plans import LoopPlan
from mstpass.torch_internals.aot_autograd import merge_equal_nodes
from tests.checks import joint_graph

TOKENS, D = 2**15, 32


def _node_reads(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often planning asks a node for its operands: every walk over the graph does."""
    weights = [
        torch.zeros(shape, requires_grad=True) for shape in layers * [(D, 4 * D), (4 * D, D)]
    ]

    def mlps(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = (x + torch.relu(x @ up) @ down).flip(0)  # no loop goes over two layers
        return x.square().sum()

    module, outputs = joint_graph(mlps, torch.zeros(TOKENS, D), *weights)
    merge_equal_nodes(module)
    operands = fx.Node.all_input_nodes
    count = 0

    def counted(node: fx.Node) -> list[fx.Node]:
        nonlocal count
        count += 1
        return operands.__get__(node)

    options = Options.parse({}, environ={})
    with monkeypatch.context() as patch:
        patch.setattr(fx.Node, "all_input_nodes", property(counted))
        result = pipeline.run(module, options, num_fwd_outputs=outputs, stop_after="plan")
    assert result.problem is not None and len(result.problem.regions) == layers
    return count


def test_no_region_walks_over_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    few, twice, four_times = (_node_reads(layers, monkeypatch) for layers in (5, 10, 20))
    assert four_times - twice <= 2.05 * (twice - few)


def test_bodies_of_equal_layers_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = 0

    def counted(joint: JointGraph, loop: LoopPlan, builder: Builder) -> list[fx.Node]:
        nonlocal built
        built += 1
        return build_body(joint, loop, builder)

    def bodies(layers: int) -> int:
        nonlocal built
        built = 0
        size = LlamaSize(64, heads=2, mlp_width=192, vocabulary=1024, length=2048, layers=layers)
        module, *batch = llama(size, torch.device("cpu"))
        joint, outputs = joint_graph(lambda ids, target: module(ids, target), *batch)
        options = Options(memory_budget=0.0)
        result = pipeline.run(joint, options, num_fwd_outputs=outputs, stop_after="plan")
        assert result.problem is not None and len(result.problem.regions) > layers
        return built

    monkeypatch.setattr(mode_costs, "build_body", counted)
    assert bodies(3) == bodies(5) > 0
