"""Scattered constants whose dtype Inductor lost, as it does up to torch 2.12."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from mstpass import pipeline
from mstpass.graph.joint import JointGraph
from mstpass.normalize.plain_values import scattered_constants
from mstpass.options import Options
from tests.checks import joint_graph

aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
TOKENS, WIDTH, WORDS = 1024, 32, 2048


def _graph(dtype: torch.dtype) -> tuple[fx.GraphModule, int]:
    """The joint graph of a head with its loss, as torch 2.12 makes it."""

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.t(), labels)

    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=dtype, requires_grad=True)
    gm, num_forward_outputs = joint_graph(loss, hidden, weight, torch.arange(TOKENS))
    for node in _casts(gm.graph):  # torch 2.12 has none
        (choice, _) = node.args
        node.replace_all_uses_with(choice)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm, num_forward_outputs


def _casts(graph: fx.Graph) -> list[fx.Node]:
    """The casts of ``where(mask, 1.0, 0.0)``."""
    casts = graph.find_nodes(op="call_function", target=cast)
    choices = [node.args[0] for node in casts]
    return [
        node
        for node, choice in zip(casts, choices, strict=True)
        if choice.target is aten.where.self
        and all(branch.target is aten.scalar_tensor.default for branch in choice.args[1:])
    ]


def test_they_have_the_dtype_of_the_logits_again() -> None:
    gm, num_forward_outputs = _graph(torch.bfloat16)
    joint = JointGraph(gm, num_forward_outputs)
    before = [node.name for node in joint.nodes]
    (found,) = _casts(scattered_constants(joint)[0].module.graph)
    assert found.meta["val"].dtype == found.args[1] == torch.bfloat16
    assert [node.name for node in gm.graph.nodes] == before, "the graph itself stays as it was"
    options = Options.parse({"chunk_tokens": 256}, environ={})
    result = pipeline.run(gm, options, num_fwd_outputs=num_forward_outputs, stop_after="plan")
    assert [region.kind for region in result.outcome.regions] == ["lm_head"], result.outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_graphs_stay_as_they_are(dtype: torch.dtype) -> None:
    joint = JointGraph(*_graph(dtype))
    assert scattered_constants(joint)[0] is joint
