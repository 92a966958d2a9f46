"""The norm in front of an MLP joins the MLP's loops, where fewer bytes then exist in full."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass import pipeline
from mstpass.options import Options
from mstpass.plans import LoopPlan
from mstpass.regions import detect
from tests.checks import check_against_float64, joint_graph, kinds

pytestmark = [pytest.mark.sampled(6), pytest.mark.op_by_op]

FULL = pytest.mark.full
D, N = 32, 192


class ByHand(nn.Module):
    """An RMS norm in float32, as transformers writes it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


NORMS = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "by hand": ByHand,
    "no weight": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "two": lambda width: nn.Sequential(nn.LayerNorm(width), nn.RMSNorm(width)),
}


class Block(nn.Module):
    """``x + mlp(norm(x))``; ``form`` says what else reads the norm, or where it stands."""

    def __init__(self, norm: str = "rms", form: str = ""):
        super().__init__()
        self.norm, self.form = NORMS[norm](D), form
        self.up, self.down = nn.Linear(D, 8 * D, bias=False), nn.Linear(8 * D, D, bias=False)
        self.other = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "behind":
            return x + self.norm(self._mlp(x))
        n = self.norm(x)
        y = x + self._mlp(n)
        if self.form == "shared":
            y = y + self.other(n).cumsum(-2)
        return y * n.sum() if self.form == "mixed" else y

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A loss whose gradient no single loop can compute: it mixes the tokens."""
    return lambda x: torch.logsumexp(model(x).float().sin().sum(-1).flatten(), 0)


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, N // 2, D, dtype=dtype, requires_grad=True)


def _loops(model: nn.Module, **options: object) -> tuple[LoopPlan, LoopPlan, set[str]]:
    """The loops of the first region, and the inputs of both that every token has a row of."""
    given = Options.parse({"chunk_tokens": 48, **options}, environ={})
    module, outputs = joint_graph(_loss_of(model), _x())
    outcome = pipeline.run(module, given, num_fwd_outputs=outputs).outcome
    forward, backward = outcome.regions[0].loops
    return forward, backward, {i.node for i in (*forward.inputs, *backward.inputs) if i.spec}


def _changes(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: object) -> bool:
    """Whether the loops take anything in."""
    with_norm = _loops(model, **options)
    monkeypatch.setattr(detect, "absorb_norms", lambda *_: None)
    without = _loops(model, **options)
    monkeypatch.undo()
    return with_norm != without


@pytest.mark.parametrize("mode", ["save", "recompute"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_loops_read_what_the_norm_reads(norm: str, mode: str) -> None:
    budget = 0.0 if mode == "recompute" else "free"
    forward, backward, read = _loops(nn.Sequential(Block(norm), Block(norm)), memory_budget=budget)
    (result,) = [item for item in backward.outputs if item.spec]
    assert "add" in result.node, "the gradient of what the residual path carries"
    of_forward = {item.node for item in forward.inputs if item.spec}
    assert of_forward <= read and len(of_forward) == 1
    stacked = {item.node for item in forward.outputs if item.spec}
    assert len(read - of_forward - stacked) == 1, "and its gradient"


@pytest.mark.parametrize("form", ["behind", "shared", "mixed"])
def test_other_norms_stay_outside(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    assert not _changes(monkeypatch, Block(form=form))
    assert _changes(monkeypatch, Block())


@pytest.mark.parametrize(
    "norm", [n if n in ("layer", "by hand") else pytest.param(n, marks=FULL) for n in NORMS]
)
@pytest.mark.parametrize("budget", ["free", 0.0])
def test_gradients(norm: str, budget: str | float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(norm), Block(norm))
    report = check_against_float64(
        model,
        _loss_of,
        [_x()],
        memory_budget=budget,
        chunk_tokens=50,
    )
    modes = {"save"} if budget == "free" else {"recompute", "mixed"}
    assert len(report.regions) == 2 and {mode for _, mode in kinds(report)} <= modes


@pytest.mark.parametrize("precision", ["autocast", pytest.param("bfloat16", marks=FULL)])
def test_gradients_in_low_precision(precision: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = nn.Sequential(Block("by hand"), Block("layer")).to(dtype)
    report = check_against_float64(
        model,
        _loss_of,
        [_x(dtype)],
        autocast="cpu" if precision == "autocast" else None,
        chunk_tokens=50,
    )
    assert [kind for kind, _ in kinds(report)] == ["mlp", "mlp"]


def test_frozen_norms_and_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block("layer"), Block("rms"))
    model[0].norm.requires_grad_(False)
    check_against_float64(model, _loss_of, [_x().detach()], chunk_tokens=50)


def test_the_peak_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(4, 1024, D, requires_grad=True)

    def peak_bytes() -> int:
        module, outputs = joint_graph(_loss_of(model), x)
        options = Options(memory_budget=0.0)
        peak = pipeline.run(module, options, num_fwd_outputs=outputs).outcome.peak_bytes
        assert peak is not None
        return peak

    with_norm = peak_bytes()
    monkeypatch.setattr(detect, "absorb_norms", lambda *_: None)
    width_bytes = x.numel() * 4
    assert with_norm <= peak_bytes() - 0.9 * width_bytes
