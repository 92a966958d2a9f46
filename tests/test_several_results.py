"""Ops with several results, or with operands that are no tensors, end no region with an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mstpass import pipeline
from mstpass.options import Options
from tests.checks import joint_graph
from tests.models import TwoLayerMLP

FULL = pytest.mark.full
VOCAB, WIDTH, CHUNK = 600, 32, 32


def _run(module: fx.GraphModule) -> list[Tensor]:
    """What a joint graph returns for random inputs, the same ones for equal placeholders."""
    torch.manual_seed(0)
    inputs: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            inputs.append(value.node.hint)
            continue
        shape = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        inputs.append(
            torch.randn(shape) if value.is_floating_point() else torch.zeros(shape).long()
        )
    returned = pytree.tree_leaves(fx.Interpreter(module).run(*inputs))
    return [value for value in returned if isinstance(value, Tensor)]


def _planned(
    step: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **options: Any
) -> pipeline.Result:
    """The plan of a step, after a check that the graph with its loops computes the same."""
    module, num_outputs = joint_graph(step, *inputs, dynamic=dynamic)
    given = Options(chunk_tokens=CHUNK, strict=True, **options)
    result = pipeline.run(module, given, num_fwd_outputs=num_outputs)
    assert result.joint is not None
    for got, right in zip(_run(result.joint), _run(module), strict=True):
        assert (got - right).double().norm() <= 1e-5 * right.double().norm()
    return result


def _reasons(result: pipeline.Result) -> list[str]:
    assert not result.outcome.regions
    return [rejection.reason for rejection in result.outcome.rejections]


def _ids(batch: int = 2, length: int = 64) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


def _logits() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB, bias=False))


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


# ---- slices of tokens behind a norm --------------------------------------------------------------
class Normed(nn.Module):
    """A checkpointed layer, a final norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return x + torch.tanh(self.inner(x))

        x = checkpoint(layer, self.embed(ids), use_reentrant=False)
        return self.head(checkpoint(self.norm, x, use_reentrant=False))


@pytest.mark.parametrize(
    ("sliced", "length", "dynamic"),
    [
        (lambda x: x[:, :-1], 63, None),
        pytest.param(lambda x: x[:, 3:], 61, None, marks=FULL),
        pytest.param(lambda x: x[:, 3:], 61, True, marks=FULL),
    ],
)
def test_a_norm_before_sliced_logits(
    sliced: Callable[[Tensor], Tensor], length: int, dynamic: bool | None
) -> None:
    model = Normed()
    result = _planned(lambda i: _loss(sliced(model(i)), sliced(i)), _ids(), dynamic=dynamic)
    (plan,) = result.outcome.regions
    assert (plan.kind, plan.mode, plan.num_tokens) == ("lm_head", "fused", 2 * length)


def test_a_slice_whose_dims_are_in_another_order() -> None:
    """The vocabulary comes first, and the batch last."""
    model = _logits()

    def step(ids: Tensor) -> Tensor:
        return _loss(model(ids).permute(2, 1, 0)[..., 1:].permute(2, 1, 0), ids[1:])

    reason = "a view merges token dims out of order; under a memory_budget it may run in chunks"
    assert _reasons(_planned(step, _ids(4, 32))) == [reason]


# ---- what leaves a region ------------------------------------------------------------------------
PARTS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda y: y.split([8, 24], -1),
    "topk": lambda y: y.topk(4, -1),
    "unbind": lambda y: y.unflatten(-1, (2, WIDTH // 2)).unbind(-2),
    "sort": lambda y: y.sort(-1),
    "max": lambda y: y.max(-1),
    "only the values": lambda y: y.max(-1).values,
}


@pytest.mark.parametrize(
    "name",
    ["split", "topk", *(pytest.param(n, marks=FULL) for n in PARTS if n not in ("split", "topk"))],
)
@pytest.mark.parametrize("budget", ["free", pytest.param(0.0, marks=FULL)])
def test_an_mlp_whose_result_is_taken_apart(name: str, budget: str | float) -> None:
    mlp = TwoLayerMLP(WIDTH, 8 * WIDTH, "gelu", bias=True)
    x = torch.randn(2, 64, WIDTH, requires_grad=True)
    result = _planned(lambda x: PARTS[name](mlp(x)), x, memory_budget=budget)
    (plan,) = result.outcome.regions
    assert plan.kind == "mlp" and plan.mode in ("save", "recompute")


# ---- pointwise ops -------------------------------------------------------------------------------
def test_a_pointwise_op_with_two_results() -> None:
    model = _logits()

    def step(ids: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(model(ids))
        return _loss(3 * mantissa + exponent, ids)

    assert [plan.mode for plan in _planned(step, _ids()).outcome.regions] == ["fused"]


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_an_operand_that_is_a_symbolic_float() -> None:
    model = _logits()

    def step(ids: Tensor, scale: Tensor) -> Tensor:
        logits = model(ids)
        return _loss(torch.addcmul(logits, logits, logits, value=scale.item()), ids)

    (reason,) = _reasons(_planned(step, _ids(), torch.tensor(2.0)))
    assert re.fullmatch(r"an operand of \w+ is not a tensor", reason)  # addcmul; a product on 2.11


def test_a_constant_of_the_graph() -> None:
    """It is an attribute of the graph's module, as the graph's subgraphs are."""
    model = _logits()

    def step(ids: Tensor) -> Tensor:
        return _loss(model(ids) * torch.tensor([0.5, 2.0]).repeat(VOCAB // 2), ids)

    module, _ = joint_graph(step, _ids())
    constants = module.graph.find_nodes(op="get_attr")
    assert [node for node in constants if "_tensor_constant" in str(node.target)]
    assert [plan.kind for plan in _planned(step, _ids()).outcome.regions] == ["lm_head"]


def test_a_region_that_reads_constants_only() -> None:
    mlp = TwoLayerMLP(WIDTH, 8 * WIDTH, "gelu", bias=True)
    x = torch.randn(128, WIDTH, requires_grad=True)
    result = _planned(lambda x: mlp(torch.ones(128, WIDTH)) * x, x)
    assert _reasons(result) == ["a loop would read constants only, and nothing with tokens"]


@pytest.mark.parametrize("of_tokens", [True, pytest.param(False, marks=FULL)])
def test_padding_by_a_symbolic_size(of_tokens: bool) -> None:
    model = _logits()

    def step(ids: Tensor, other: Tensor) -> Tensor:
        count = other.shape[0]
        if of_tokens:
            return _loss(F.pad(model(ids), (0, 0, 0, count)), F.pad(ids, (0, count), value=-100))
        return _loss(F.pad(model(ids), (0, count), value=-1e4), ids)

    reason = (
        "aten.constant_pad_nd.default works along a token dim; under a memory_budget it may run in "
        "chunks"
        if of_tokens
        else "a dim other than the token dims has a symbolic size"
    )
    assert _reasons(_planned(step, _ids(), torch.zeros(5), dynamic=True)) == [reason]
