"""Planning takes time in proportion to the graph, not to its square."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mstpass import pipeline
from mstpass.bench.models import LlamaSize, llama
from mstpass.loops.plan_region import Names, Originals
from mstpass.options import Options
from mstpass.plans import Region
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


@pytest.mark.parametrize("budget", ["free", 0.0])
def test_equal_layers_are_planned_once(
    budget: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the problem is the one of layers that are planned each by itself."""
    found: list[bool] = []
    of = Originals.of

    def counted(self: Originals, region: Region) -> tuple[Region, Names] | None:
        found.append((copy := of(self, region)) is not None)
        return copy

    size = LlamaSize(width=64, heads=2, mlp_width=192, vocabulary=1024, length=2048, layers=4)
    module, *batch = llama(size, torch.device("cpu"))
    joint, outputs = joint_graph(lambda ids, target: module(ids, target), *batch)

    def planned() -> pipeline.Result:
        options = Options(memory_budget=budget, free_overhead=0.5)
        return pipeline.run(joint, options, num_fwd_outputs=outputs, stop_after="plan")

    monkeypatch.setattr(Originals, "of", counted)
    once = planned()
    assert sum(found) >= 3, "the first and the last layer have other neighbors"
    monkeypatch.setattr(Originals, "of", lambda self, region: None)
    each = planned()
    assert once.problem == each.problem and once.problem is not None and once.problem.regions
    assert once.outcome.regions == each.outcome.regions
