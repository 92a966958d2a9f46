"""Planning takes time in proportion to the graph, not to its square."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mstpass import pipeline
from mstpass.options import Options
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
