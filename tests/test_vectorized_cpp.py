"""Gradients that Inductor's vectorized C++ has wrong by itself, from torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mstpass.torch_internals.scheduler_mends import MendScheduler

pytestmark = pytest.mark.sampled(1)

HOOK = "_pre_fusion_custom_pass"
ROWS, COLUMNS = 8192, 8


def softmax(x: Tensor, weights: Tensor) -> Tensor:
    return (x.softmax(-1).t() * weights).square().mean()


def topk(x: Tensor, weights: Tensor) -> Tensor:
    return (x.softmax(-1).t().topk(100, -1).values * weights[:, :100]).sum()


def last_head(x: Tensor, weights: Tensor) -> Tensor:
    """The last head of ``[B, N, heads, d]``, with the tokens last; its gradient is added to x's."""
    head = x.view(4, 64, 4, 64)[:, :, torch.tensor([-1])].permute(0, 2, 3, 1)
    return (head * weights.view(4, 4, 64, 64)).sin().sum()


@pytest.mark.slow
@pytest.mark.parametrize("step", [softmax, topk, last_head])
def test_gradients_are_right(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(ROWS, COLUMNS, requires_grad=True), torch.randn(COLUMNS, ROWS)
    mender = MendScheduler()
    compiled = torch.compile(step, backend="inductor", options={HOOK: mender})
    (found,) = torch.autograd.grad(compiled(x, weights), x)
    (expected,) = torch.autograd.grad(step(x, weights), x)
    assert mender.graphs
    torch.testing.assert_close(found, expected)
