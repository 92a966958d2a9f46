"""Backward overwrites nothing that the caller holds: views of results share their storages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.graph.renew_values import share_storages
from tests.checks import compiled, joint_graph

aten = torch.ops.aten


class LastToken(nn.Module):
    """The result of an MLP is saved for the norm behind it; a view of it is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 96), nn.Linear(96, 8)
        self.head = nn.Linear(8, 97, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x + self.before(x).exp())
        x = self.down(F.leaky_relu(self.up(x)))
        logits = self.head(F.layer_norm(x, (8,)))[:, -1:]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, -1:].flatten()), x[:, -1:]


def test_backward_does_not_overwrite_a_view_that_was_returned() -> None:
    model, labels = LastToken(), torch.randint(97, (1, 17))
    x = torch.randn(1, 17, 8, requires_grad=True)
    for tensor in (x, labels):
        torch._dynamo.mark_dynamic(tensor, 1)
    loss, last = compiled(model)(x, labels)
    expected = last.detach().clone()
    (loss + last.sum()).backward()
    assert torch.equal(last, expected)


def test_views_of_a_node_with_a_new_value_are_computed_again() -> None:
    module, _ = joint_graph(lambda x: x.sin().view(2, 16).t().exp().sum(), _leaf())
    (sine,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    views = [n for n in module.graph.nodes if n.target in (aten.view.default, aten.permute.default)]
    assert views
    before = {n: n.meta["val"] for n in module.graph.nodes if "val" in n.meta}
    share_storages(module.graph)
    assert all(n.meta["val"] is value for n, value in before.items())
    sine.meta["val"] = sine.meta["val"].clone()
    share_storages(module.graph)
    storage = sine.meta["val"].untyped_storage()._cdata
    shared = {
        n
        for n in views
        if n.meta["val"].untyped_storage()._cdata == storage
        and n.meta["val"].shape == before[n].shape
    }
    assert shared and all(n.meta["val"] is not before[n] for n in shared)


def _leaf() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)
