"""Every kind of MLP, chunked under Inductor: gradients against eager and float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.checks import check_against_float64, kinds
from tests.models import MLPS, Block

pytestmark = [pytest.mark.sampled(3), pytest.mark.op_by_op]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.kernels) if n == "swiglu_bias" else n for n in MLPS]
)
def test_mlp_in_save_mode(name: str, device: str) -> None:
    model = Block(32, MLPS[name](32)).to(device)
    x = torch.randn(2, 96, 32, device=device, requires_grad=True)
    report = check_against_float64(model, _loss_through_norm, [x], chunk_tokens=64)
    assert kinds(report) == [("mlp", "save")], report


def _loss_through_norm(model: nn.Module):
    """A loss that is not linear in the block's output: its backward cannot run in the forward."""
    return lambda x: torch.logsumexp(model(x).sin().sum(-1).flatten(), 0)


@pytest.mark.parametrize(
    "name", ["swiglu", pytest.param("gelu", marks=pytest.mark.kernels), "fused_gate_up"]
)
def test_mlp_recomputes_with_budget_zero(name: str, device: str) -> None:
    model = Block(32, MLPS[name](32)).to(device)
    x = torch.randn(3, 67, 32, device=device, requires_grad=True)  # 201 tokens: a ragged tail
    report = check_against_float64(
        model, _loss_through_norm, [x], chunk_tokens=64, memory_budget=0.0
    )
    assert kinds(report) == [("mlp", "mixed")], report


@pytest.mark.parametrize(("batch", "seq"), [pytest.param(1, 128, marks=pytest.mark.full), (3, 43)])
def test_several_layers_share_bodies(batch: int, seq: int, device: str) -> None:
    model = nn.Sequential(*(Block(32, MLPS["swiglu"](32)) for _ in range(3))).to(device)
    x = torch.randn(batch, seq, 32, device=device, requires_grad=True)
    report = check_against_float64(model, _loss_through_norm, [x], chunk_tokens=32)
    assert kinds(report) == [("mlp", "save")] * 3, report


def test_two_dimensional_tokens(device: str) -> None:
    model = Block(32, MLPS["swiglu"](32)).to(device)
    x = torch.randn(130, 32, device=device, requires_grad=True)
    report = check_against_float64(model, _loss_through_norm, [x], chunk_tokens=64)
    assert kinds(report) == [("mlp", "save")], report


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.full), True])
def test_low_precision(autocast: bool, device: str) -> None:
    model = nn.Sequential(*(Block(32, MLPS["swiglu"](32)) for _ in range(2))).to(device)
    x = torch.randn(2, 101, 32, device=device)
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    x.requires_grad_()
    report = check_against_float64(
        model, _loss_through_norm, [x], autocast=device if autocast else None, chunk_tokens=64
    )
    assert ("mlp", "save") in kinds(report), report


def test_frozen_mlp_still_gives_input_gradients(device: str) -> None:
    model = Block(32, MLPS["swiglu"](32)).to(device)
    model.mlp.requires_grad_(False)
    x = torch.randn(2, 64, 32, device=device, requires_grad=True)
    report = check_against_float64(model, _loss_through_norm, [x], chunk_tokens=64)
    assert kinds(report) == [("mlp", "save")], report


@pytest.mark.kernels
def test_loss_linear_in_the_mlp_is_fused(device: str) -> None:
    model = MLPS["gelu"](32).to(device)
    x = torch.randn(2, 96, 32, device=device, requires_grad=True)
    weight = torch.rand(2, 96, 32, device=device)
    report = check_against_float64(
        model, lambda m: lambda x, w: ((m(x) + 1) * w).sum() * 0.3, [x, weight], chunk_tokens=64
    )
    assert kinds(report) == [("mlp", "fused")], report


def test_blocks_with_no_attention_between_are_one_fused_region(device: str) -> None:
    """The loop contains norms, their gradients and the loss: the whole step is one loop."""
    model = nn.Sequential(*(Block(32, MLPS["swiglu"](32)) for _ in range(2))).to(device)
    x = torch.randn(2, 65, 32, device=device, requires_grad=True)
    report = check_against_float64(
        model, lambda m: lambda x: m(x).sin().sum(), [x], chunk_tokens=64
    )
    assert kinds(report) == [("mlp", "fused")], report
