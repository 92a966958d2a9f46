"""Whole steps with reconstruction: fewer saved bytes and right gradients, also under Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import mstpass
from mstpass import pipeline
from mstpass.partition.reconstruct import is_compared
from mstpass.partition.reconstruct.rules import EXACT, TOLERANT
from mstpass.problem import solver_registry
from mstpass.report.report import Report
from tests.checks import check_against_float64, joint_graph
from tests.models import Block, GatedMLP, TwoLayerMLP
from tests.reconstructed import EVERY_PLACE, MODES, save_at_every_place, save_plan, split_step

pytestmark = [pytest.mark.sampled(3), pytest.mark.op_by_op]


class RMSNorm(nn.Module):
    """As in Hugging Face's models: in float32, the result in the input's type."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight * wide).to(x.dtype)


class Mixed(nn.Module):
    """A post-norm block; a product over tokens stands for attention."""

    def __init__(self, d: int, norm: Callable[[int], nn.Module], mlp: nn.Module, drop: float = 0):
        super().__init__()
        self.norm_a, self.norm_b, self.mlp = norm(d), norm(d), mlp
        self.value, self.drop = nn.Linear(d, d, bias=False), drop
        for module in (self.norm_a, self.norm_b):
            nn.init.uniform_(module.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cumsum(self.value(x), 1) / x.shape[1]
        x = x + self.norm_a(F.dropout(mixed, self.drop))
        return x + self.norm_b(F.dropout(self.mlp(x), self.drop))


class PostLayerNorm(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_a(x + torch.cumsum(self.value(x), 1) / x.shape[1])
        return self.norm_b(x + self.mlp(x))


D = 32
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "rms": lambda: [Mixed(D, RMSNorm, GatedMLP(D, 96, "silu")) for _ in range(3)],
    "layer": lambda: [
        PostLayerNorm(D, nn.LayerNorm, TwoLayerMLP(D, 128, "gelu", True)) for _ in range(3)
    ],
    "dropout": lambda: [Mixed(D, nn.LayerNorm, GatedMLP(D, 96, "silu"), 0.2) for _ in range(2)],
}


def _model(name: str) -> nn.Module:
    return nn.Sequential(*MODELS[name](), nn.Linear(D, D)).train()


def _one_block(name: str) -> nn.Module:
    """As small as it can be, for kernels."""
    return nn.Sequential(MODELS[name]()[0], nn.Linear(D, D)).train()


def _loss(model: nn.Module, autocast: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(x: torch.Tensor) -> torch.Tensor:
        context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            return torch.tanh(model(x).float()).square().mean()

    return loss


@pytest.fixture(autouse=True)
def _every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solver_registry.registered, EVERY_PLACE, save_at_every_place)


def _run(result: pipeline.Result, outputs: int) -> list[torch.Tensor]:
    """Forward and backward as they are, on numbers made for the placeholders."""
    assert result.modules is not None
    forward, backward = result.modules
    torch.manual_seed(0)
    values = [
        torch.randn(n.meta["val"].shape, dtype=n.meta["val"].dtype)
        for n in forward.graph.find_nodes(op="placeholder")
    ]
    torch.manual_seed(1)
    results = forward(*values)
    tangents = [torch.ones_like(result) for result in results[:outputs]]
    return [g for g in backward(*results[outputs:], *tangents) if g is not None]


@pytest.mark.parametrize(
    ("name", "autocast"), [("rms", False), ("rms", True), ("layer", False), ("dropout", False)]
)
def test_fewer_bytes_and_the_same_gradients(name: str, autocast: bool) -> None:
    """Exact: bit for bit those of ``off``. Tolerant: close, for fewer bytes still."""
    graph, outputs = joint_graph(_loss(_model(name), autocast), torch.randn(2, 96, D))
    results = {mode: split_step(graph, outputs, mode) for mode in MODES}
    saved = {mode: save_plan(result).saved_bytes for mode, result in results.items()}
    expects_exact = autocast or name == "dropout"
    assert saved["exact"] < saved["off"] if expects_exact else saved["exact"] == saved["off"]
    assert saved["tolerant"] < saved["exact"]
    assert {r.grade for r in save_plan(results["exact"]).reconstructed} <= {EXACT}
    grades = {r.grade for r in save_plan(results["tolerant"]).reconstructed}
    assert TOLERANT in grades
    assert all(r.bytes > 0 and r.sources for r in save_plan(results["tolerant"]).reconstructed)
    off, exact, tolerant = (_run(results[mode], outputs) for mode in MODES)
    for a, b, c in zip(off, exact, tolerant, strict=True):
        assert torch.equal(a, b)
        bound = 2e-2 if autocast else 1e-5
        assert float((a - c).norm()) <= bound * float(a.norm()) + 1e-12


def test_a_bfloat16_stream_is_left_alone() -> None:
    model = _model("rms").bfloat16()
    graph, outputs = joint_graph(_loss(model), torch.randn(2, 96, D, dtype=torch.bfloat16))
    plan = save_plan(split_step(graph, outputs, "tolerant"))
    assert not any("sum" in item.rule for item in plan.reconstructed)


@pytest.mark.parametrize("solver", ["min_cut", "checkpoints"])
def test_a_pre_norm_model_has_nothing_to_win(solver: str) -> None:
    model = nn.Sequential(*(Block(D, GatedMLP(D, 96, "silu")) for _ in range(2)))
    graph, outputs = joint_graph(_loss(model), torch.randn(2, 96, D, requires_grad=True))
    off, tolerant = (split_step(graph, outputs, m, solver=solver, chunk="off") for m in MODES[::2])
    assert save_plan(tolerant).saved_bytes <= save_plan(off).saved_bytes
    if solver == "min_cut":  # checkpoints may lie within a layer, where sums are
        assert save_plan(tolerant).saved_bytes == save_plan(off).saved_bytes


def test_symbolic_sizes() -> None:
    graph, outputs = joint_graph(_loss(_model("rms")), torch.randn(2, 96, D), dynamic=True)
    off, tolerant = (save_plan(split_step(graph, outputs, mode)) for mode in MODES[::2])
    assert tolerant.saved_bytes < off.saved_bytes


def test_the_report_tells_and_survives_json(tmp_path: Any) -> None:
    graph, outputs = joint_graph(_loss(_model("rms")), torch.randn(2, 96, D))
    report = Report(split_step(graph, outputs, "tolerant").outcome)
    (first, *_) = report.reconstructed
    assert first.grade == TOLERANT and first.bounds and "sum" in first.rule
    assert f"{first.node}" in str(report) and "reconstructed" in str(report)
    report.to_json(tmp_path / "report.json")
    assert Report.from_json(tmp_path / "report.json").reconstructed == report.reconstructed


# ---- under Inductor -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("mode", ["exact", pytest.param("tolerant", marks=pytest.mark.full)])
def test_gradients_under_inductor(mode: str) -> None:
    report = check_against_float64(
        _one_block("rms") if mode == "exact" else _model("rms"),
        lambda model: lambda x: torch.tanh(model(x).float()).square().mean(),
        [torch.randn(2, 96, D)],
        autocast="cpu",
        memory_budget=0.0,
        chunk_tokens=64,
        reconstruct=mode,
        solver=EVERY_PLACE,
    )
    assert report.reconstructed


def test_masks_are_packed_where_they_are_made() -> None:
    """Behind the forward, what they are made from would have lived as long: more than is won."""
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + F.dropout((x @ weight).relu(), 0.1) @ weight.t()
            x = x + F.dropout((x @ x.t()).softmax(-1), 0.1) @ x
        return x.square().mean()

    def report(mode: str) -> Any:
        options = {"memory_budget": 0.0, "reconstruct": mode}
        return mstpass.explain(loss, torch.randn(512, 64), options=options)

    bytes_, bits = report("off"), report("exact")
    assert {item.rule for item in bits.reconstructed} == {"bits"}
    assert bits.saved_bytes < bytes_.saved_bytes and bits.peak_bytes < bytes_.peak_bytes


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.full
def test_dropout_masks_as_bits_under_inductor() -> None:
    """With equal seeds, gradients are the same whether masks cross as bits or as bytes."""
    model, x = _one_block("dropout"), torch.randn(2, 96, D)

    def gradients(mode: str) -> list[torch.Tensor]:
        torch.compiler.reset()
        model.zero_grad(set_to_none=True)
        options = {"strict": True, "chunk": "off", "reconstruct": mode, "memory_budget": 0.0}
        step = torch.compile(_loss(model), backend="mst", options=options)
        torch.manual_seed(3)
        step(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    bytes_, bits = gradients("off"), gradients("exact")
    off, exact = mstpass.reports()[-2:]
    assert exact.saved_bytes < off.saved_bytes
    assert "bits" in {item.rule for item in exact.reconstructed}
    for a, b in zip(bytes_, bits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("read", "compared"),
    [
        (lambda x: x.le(0), True),
        (lambda x: (2 * x).flip(0)[1:] > 0, True),
        (lambda x: x.sign(), True),
        (lambda x: x.bool(), True),
        (lambda x: (x @ x).le(0), False),
        (lambda x: x.sum() > 0, False),
        (lambda x: x.exp(), False),
    ],
)
def test_which_values_are_compared(read: Any, compared: bool) -> None:
    graph = make_fx(read, tracing_mode="fake")(torch.randn(4, 4)).graph
    assert is_compared(next(iter(graph.nodes))) == compared
