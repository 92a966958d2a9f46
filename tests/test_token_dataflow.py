"""The token dims of all values of a joint graph, and the ops at which they end."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import SUM, WHOLE, Refusal
from tests.checks import joint_graph
from tests.models import MLPS, Block, TinyLM, next_token_loss
from tests.token_dataflow import Dataflow, Mixed, missing_ops, token_dims

B, S, D, VOCAB = 2, 24, 32, 600


def flow_of(fn: Callable[..., object], *inputs: object) -> tuple[JointGraph, Dataflow]:
    joint = JointGraph(*joint_graph(fn, *inputs))
    flow = token_dims(joint)
    _check_certificate(joint, flow)
    return joint, flow


def _check_certificate(joint: JointGraph, flow: Dataflow) -> None:
    """Check that the operands of every op but barriers have the cuts that its rule needs."""
    for node in joint.nodes:
        cut = flow.cuts.get(node.name, WHOLE)
        if node.op != "call_function" or node.name in flow.barriers or cut == WHOLE:
            continue
        if isinstance(cut, tuple):
            if node.target is operator.getitem and node.args[0].name in flow.barriers:
                continue  # one of a barrier's results, cut as its users need it
            needs = ops.operand_specs(node, cut)
            assert not isinstance(needs, Refusal), node
            for operand, need in needs.items():
                known = flow.cuts[operand.name]
                assert known == need or (need == WHOLE and known == SUM), (node, operand)


def targets(joint: JointGraph, flow: Dataflow) -> set[str]:
    return {str(joint.by_name[name].target).split(".")[1] for name in flow.barriers}


# what adds an embedding's rows; torch 2.11 traces another op
ADDED_ROWS = "index_put" if torch.__version__ < "2.12" else "_unsafe_masked_index_put_accumulate"


def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, S))


def test_a_head_has_no_barrier_but_the_embeddings_gradient() -> None:
    model = TinyLM(VOCAB, D)
    joint, flow = flow_of(
        lambda i: F.cross_entropy(model.logits(i).flatten(0, 1), i.flatten()), ids()
    )
    assert flow.num_tokens == B * S
    assert targets(joint, flow) == {ADDED_ROWS}
    (seen,) = (
        n for n in joint.nodes if n.op == "placeholder" and n.meta["val"].dtype == torch.int64
    )
    assert flow.cuts[seen.name] == (0, 1)
    summed = [n for n in joint.backward_outputs if flow.cuts[n.name] == SUM]
    assert summed, "weight gradients are sums over tokens"


def test_shifted_labels_end_at_the_shift() -> None:
    model = TinyLM(VOCAB, D)
    joint, flow = flow_of(lambda i: next_token_loss(model, i), ids())
    shift = {"constant_pad_nd", "slice"}
    assert targets(joint, flow) == {*shift, ADDED_ROWS}


@pytest.mark.parametrize("name", MLPS)
def test_mlps_have_no_barriers(name: str) -> None:
    model = nn.Sequential(*(Block(D, MLPS[name](D)) for _ in range(2)))
    x = torch.randn(B, S, D, requires_grad=True)
    joint, flow = flow_of(lambda x: model(x).square().sum(-1).sum(), x)
    assert not flow.barriers
    for node in joint.nodes:
        if node.op == "placeholder" and node.meta["val"].shape == (B, S, D):
            assert flow.cuts[node.name] == (0, 1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_attention_is_a_barrier_and_values_after_it_have_cuts() -> None:
    attention, mlp = Attention(), Block(D, MLPS["gelu"](D))
    x = torch.randn(B, S, D, requires_grad=True)
    joint, flow = flow_of(lambda x: mlp(x + attention(x)).square().sum(-1).sum(), x)
    assert all("attention" in t for t in targets(joint, flow))
    assert all("every token reads other tokens" in r for r in flow.barriers.values())
    for node in joint.nodes:  # all but what it hands to its own backward is cut
        if "attention" not in str(node.target) and node.target is not operator.getitem:
            assert not isinstance(flow.cuts.get(node.name), Mixed), node
    assert not missing_ops(joint)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda h: h - h.mean(1, keepdim=True),
        lambda h: h.cumsum(1),
        lambda h: h.softmax(1),
        lambda h: h.flip(1),
        lambda h: h.roll(1, 1),
        lambda h: F.pad(h, (0, 0, 1, -1)),
        lambda h: h.sort(1)[0],
        lambda h: h[:, torch.arange(S - 1, -1, -1)],
        lambda h: h @ h.transpose(1, 2) @ h,
        lambda h: h.transpose(1, 2).reshape(h.shape),
    ],
)
def test_ops_that_mix_tokens_are_barriers(mixes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    up, down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
    x = torch.randn(B, S, D, requires_grad=True)
    joint, flow = flow_of(lambda x: down(mixes(F.relu(up(x)))).square().sum(-1).sum(), x)
    forward = [n for n in flow.barriers if joint.by_name[n] not in joint.backward]
    assert forward, "nothing was found to mix tokens"


def test_an_op_without_a_rule_is_counted() -> None:
    """unfold of a product of tokens counts, unfold of the weight does not."""
    aten, graph = torch.ops.aten, fx.Graph()
    x, w = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    product = graph.call_function(aten.mm.default, (x, w))
    unfolded = [graph.call_function(aten.unfold.default, (n, 1, 2, 1)) for n in (w, product)]
    graph.output(tuple(unfolded))
    x.meta["val"], w.meta["val"] = torch.randn(B * S, D), torch.randn(D, D)
    product.meta["val"] = x.meta["val"] @ w.meta["val"]
    for node in unfolded:
        node.meta["val"] = node.args[0].meta["val"].unfold(1, 2, 1)
    joint = JointGraph(fx.GraphModule(nn.Module(), graph), 1)
    assert dict(missing_ops(joint)) == {"aten.unfold.default": 1}
    flow = token_dims(joint)
    assert flow.cuts[unfolded[0].name] == WHOLE
    reason = "no token rule for aten.unfold.default"
    assert flow.cuts[unfolded[1].name] == Mixed(unfolded[1].name, reason)


def test_symbolic_sizes_are_refused() -> None:
    up = nn.Linear(D, 2 * D)
    x = torch.randn(B, S, D, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 1)
    with pytest.raises(ValueError, match="symbolic"):
        token_dims(JointGraph(*joint_graph(lambda x: up(x).square().sum(), x)))
