"""Backwards that keep their graph (``retain_graph``, ``create_graph``), and double backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from tests.checks import compiled, errors, gradients, in_float64
from tests.models import TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op

VOCAB, D = 997, 32


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (batch, length))


@pytest.mark.parametrize("backward_before", [False, pytest.param(True, marks=pytest.mark.kernels)])
def test_a_backward_runs_twice_over_its_graph(backward_before: bool) -> None:
    torch.compiler.reset()
    model, ids = TinyLM(VOCAB, D), _ids(2, 70)
    wide, _ = in_float64(model, [])
    exact = gradients(wide, lambda i: next_token_loss(wide, i), [ids])[1:]
    eager = errors(gradients(model, lambda i: next_token_loss(model, i), [ids])[1:], exact)
    step = compiled(lambda i: next_token_loss(model, i), chunk_tokens=64)
    if backward_before:
        step(ids).backward()
    loss = step(ids)
    for keep in (True, True, False):  # the last one may overwrite what is saved
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=keep)
        ours = errors([p.grad for p in model.parameters()], exact)
        assert all(mine <= theirs + 1e-6 for mine, theirs in zip(ours, eager, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert mstpass.reports()[-1].regions


@pytest.mark.kernels
def test_the_same_from_the_compile_cache() -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, D, requires_grad=True)
    h, y = torch.randn(256, D), torch.randint(VOCAB, (256,))

    def loss_fn(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h @ weight.t(), y)

    expected = torch.autograd.grad(loss_fn(h, y), weight)[0]
    for _ in range(2):  # compiled, then cached
        torch.compiler.reset()
        loss = compiled(loss_fn, chunk_tokens=64)(h, y)
        for _ in range(2):
            found = torch.autograd.grad(loss, weight, retain_graph=True)[0]
            torch.testing.assert_close(found, expected)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 1))


def test_double_backward_is_an_error() -> None:
    torch.compiler.reset()
    net, x = _net(), torch.randn(256, 3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return net(x).sum()

    (slope,) = torch.autograd.grad(
        torch.compile(step, backend="mst")(x), x, create_graph=True
    )  # taking it is no error
    with pytest.raises(RuntimeError, match="support double backward"):
        slope.square().mean().backward()


# Dynamo asks the tensor between the two graphs for its .grad
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_double_backward_inside_of_a_step_is_an_error() -> None:
    torch.compiler.reset()
    net, x = _net(), torch.randn(256, 3, requires_grad=True)

    def step() -> Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope.square().mean()

    with pytest.raises(RuntimeError, match="support double backward"):
        torch.compile(step, backend="mst")().backward()


def test_a_gradient_inside_of_a_step() -> None:
    torch.compiler.reset()
    net, x = _net(), torch.randn(256, 3)
    wide, (wide_x,) = in_float64(net, [x])

    def loss_of(net: nn.Module):
        return lambda x: torch.func.grad(lambda x: net(x).sum())(x).square().mean()

    exact = gradients(wide, loss_of(wide), [wide_x])
    eager = errors(gradients(net, loss_of(net), [x]), exact)
    ours = errors(gradients(net, compiled(loss_of(net)), [x]), exact)
    assert all(mine <= theirs + 1e-6 for mine, theirs in zip(ours, eager, strict=True))
