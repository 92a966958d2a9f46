"""Values that are made of equal copies: found by the graph alone, and one copy crosses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import mstpass
from mstpass.graph.joint import JointGraph
from mstpass.partition.reconstruct.copies import copied_dims
from tests.checks import joint_graph

aten = torch.ops.aten
B, S, D, HEADS = 3, 24, 16, 2


def _scores(x: Tensor, mask: Tensor) -> Tensor:
    """Something that reads the mask."""
    return ((x @ x.transpose(1, 2)).unsqueeze(1) + mask).softmax(-1).square().sum()


def causal(x: Tensor) -> Tensor:
    seen = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S)
    return _scores(x, torch.where(seen, 0.0, -1e9))


def packed(x: Tensor) -> Tensor:
    """As transformers finds sequences that are packed in one, here none."""
    positions = torch.arange(S).expand(B, S)
    sequence = (positions.diff(prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(B)[:, None, None, None]
    rows, columns = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    return _scores(x, torch.where(sequence[batch, rows] == sequence[batch, columns], 0.0, -1e9))


def padded(x: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence has a mask of its own."""
    seen = torch.arange(S).expand(B, 1, S, S) < lengths[:, None, None, None]
    return _scores(x, torch.where(seen, 0.0, -1e9))


def computed(x: Tensor) -> Tensor:
    """A kernel may round the last of the copies' elements in another way."""
    return _scores(x, torch.linspace(-1, 1, S).exp().expand(B, 1, S, S).exp())


def dropped(x: Tensor) -> Tensor:
    """Copies until dropout draws for each element."""
    return _scores(x, F.dropout(torch.zeros(S).expand(B, 1, S, S) + 1.0, 0.5))


def _found(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[JointGraph, dict[fx.Node, Any]]:
    graph, outputs = joint_graph(fn, torch.randn(B, S, D, requires_grad=True), *inputs)
    joint = JointGraph(graph, outputs)
    return joint, copied_dims(joint)


LENGTHS = torch.tensor([5, 24, 11])


@pytest.mark.parametrize(
    ("fn", "inputs", "dims"),
    [
        (causal, (), [{0}]),
        (packed, (), [{0}]),
        (padded, (LENGTHS,), [{2}]),  # all tokens of a sequence see the same ones
        (computed, (), []),
        (dropped, (), []),
    ],
)
def test_what_is_found_is_so(fn: Callable[..., Tensor], inputs: Any, dims: Any) -> None:
    """Run on numbers, every value that is found is the same along its dims; masks are found."""
    joint, found = _found(fn, *inputs)

    class Run(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            for dim in found.get(node, ()):
                assert torch.equal(value, value.narrow(dim, 0, 1).expand_as(value)), node
            return value

    inputs_of = [n.meta["val"] for n in joint.module.graph.find_nodes(op="placeholder")]
    Run(joint.module).run(
        *(torch.randn(v.shape) if v.is_floating_point() else LENGTHS for v in inputs_of)
    )
    wide = [n for n in joint.nodes[:-1] if n.meta["val"].shape == (B, 1, S, S)]
    floats = [n for n in wide if n in found and n.meta["val"].is_floating_point()]
    made = [n for n in floats if n.target not in (aten.full.default, aten.expand.default)]
    assert [n.target for n in made] == [aten.where.self] * len(dims)
    assert [found[n] for n in made] == dims


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_one_copy_crosses_under_inductor() -> None:
    torch.manual_seed(0)
    layers, x = nn.ModuleList(Attention() for _ in range(3)), torch.randn(B, S, D)

    def loss(x: Tensor) -> Tensor:
        seen = torch.arange(S).expand(B, 1, S, S) <= torch.arange(S)[:, None]
        mask = torch.where(seen, 0.0, -1e9)
        for layer in layers:
            x = layer(x, mask)
        return x.square().mean()

    def gradients(mode: str) -> list[Tensor]:
        torch._dynamo.reset()
        layers.zero_grad(set_to_none=True)
        options = {"strict": True, "memory_budget": 0.0, "reconstruct": mode}
        torch.compile(loss, backend="mst", options=options)(x).backward()
        return [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    whole, one = gradients("off"), gradients("exact")
    off, exact = mstpass.reports()[-2:]
    assert {item.rule for item in exact.reconstructed} == {"copies"}
    assert exact.saved_bytes == off.saved_bytes - (B - 1) * S * S * 4
    for a, b in zip(whole, one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
