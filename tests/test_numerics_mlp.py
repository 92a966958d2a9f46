"""Every kind of MLP, chunked under Inductor: gradients against eager and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp, vmap

import mstpass
from mstpass.regions import detect
from mstpass.torch_internals.fake_tensors import is_ordinary
from tests.checks import check_against_float64, compiled, errors, kinds
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


# ---- tensors with dispatch keys of their own -----------------------------------------------------
def test_zeros_without_memory_are_read_by_loops() -> None:
    """Second derivatives by jvp, as physics-informed nets have them: tangents are such zeros."""
    model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 1))

    def loss(model: nn.Module):
        def second(p: torch.Tensor) -> torch.Tensor:
            slope = grad(lambda q: model(q).sum())
            return jvp(slope, (p,), (torch.ones_like(p),))[1][0]

        return lambda x: vmap(second)(x).square().mean()

    x = torch.rand(512, 2)
    report = check_against_float64(model, loss, [x], chunk_tokens=64, memory_budget=0.0)
    assert kinds(report) == [("mlp", "fused")], report


def test_values_that_are_read_with_the_other_sign() -> None:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ up.conj().imag) @ down

    up = torch.randn(32, 128, dtype=torch.complex64)

    def gradients(fn) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, up, down)]
        found = torch.autograd.grad(fn(*leaves).square().sum(), leaves)
        return [torch.view_as_real(g) if g.is_complex() else g for g in found]

    x, down = torch.randn(256, 32), torch.randn(128, 32)
    found = gradients(compiled(step, chunk_tokens=64, memory_budget=0.0))
    assert max(errors(found, gradients(step))) < 1e-5
    assert mstpass.reports()[-1].regions


def test_loops_read_ordinary_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A higher-order op has no kernel for others: a region with one is refused, with advice."""
    z = torch.randn(4, 4, dtype=torch.complex64)
    others = (z.conj(), z.conj().imag, torch._efficientzerotensor((4, 4)), z.real.to_sparse())
    assert is_ordinary(z) and not any(map(is_ordinary, others))
    monkeypatch.setattr(detect, "is_ordinary", lambda value: value.shape != (256, 128))
    up, down = torch.randn(32, 128, requires_grad=True), torch.randn(128, 32)
    step = compiled(lambda x: (F.gelu(x @ up) @ down).sin().sum(), chunk_tokens=64)
    step(torch.randn(256, 32)).backward()
    (refused,) = mstpass.reports()[-1].rejections
    assert "no ordinary tensor" in refused.reason and "resolve_neg()" in refused.fix
