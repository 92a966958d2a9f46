"""MLPs in mixed mode: forward over tokens, backward over sections of the hidden features."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.problem.problem import MIXED
from tests import expert_models
from tests.checks import check_against_float64, kinds
from tests.expert_models import Experts, Form

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.op_by_op,
    pytest.mark.usefixtures("mixed_solver"),
]

WIDTH, HIDDEN, PRIME = 24, 96, 97
OPTIONS = {"solver": "mixed", "memory_budget": 0.5, "chunk_tokens": 64}


class SwiGLU(nn.Module):
    def __init__(self, hidden: int = HIDDEN, bias: bool = False):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, hidden, bias) for _ in range(2))
        self.down = nn.Linear(hidden, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    def __init__(self, hidden: int = HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class NormAndResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class LowRank(nn.Module):
    """Frozen weights with trained adapters of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, False), nn.Linear(HIDDEN, WIDTH, False)
        self.requires_grad_(False)
        self.up_a, self.up_b = nn.Linear(WIDTH, 4, False), nn.Linear(4, HIDDEN, False)
        self.down_a, self.down_b = nn.Linear(HIDDEN, 4, False), nn.Linear(4, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(x) + 2 * self.up_b(self.up_a(x)))
        return self.down(hidden) + 2 * self.down_b(self.down_a(hidden))


class FusedGateAndUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, False)
        self.down = nn.Linear(HIDDEN, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class HalvesBySlices(FusedGateAndUp):
    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        return self.down(F.silu(both[..., :HIDDEN]) * both[..., HIDDEN:])


class Dropout(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), 0.1))


MLPS: dict[str, Callable[[], nn.Module]] = {
    "SwiGLU": SwiGLU,
    "SwiGLU with biases": lambda: SwiGLU(bias=True),
    "prime width": lambda: SwiGLU(PRIME, bias=True),
    "GELU": GELU,
    "norm and residual": NormAndResidual,
    "low rank": LowRank,
    "fused gate and up": FusedGateAndUp,
    "halves by slices": HalvesBySlices,
}
KERNELS = ("prime width", "fused gate and up")


def _step(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    """A loss whose gradients mix tokens, so that no loop has forward and backward of the MLP."""

    def loss(x: Tensor) -> Tensor:
        y = mlp(x.sin())
        return (y * (1 + y.flatten(0, -2).mean(0))).tanh().square().mean()

    return loss


def _tokens(batch: int = 3, length: int = 67) -> Tensor:
    return torch.randn(batch, length, WIDTH, requires_grad=True)


def _check_loops(report: mstpass.Report, total: int) -> None:
    assert kinds(report) == [("mlp", MIXED)], str(report)
    forward, backward = report.regions[0].loops
    assert (forward.phase, forward.cut.axis) == ("forward", "tokens")
    assert (backward.phase, backward.cut.axis) == ("backward", "features")
    assert (backward.cut.total, backward.cut.count) == (total, 4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.kernels) if n in KERNELS else n for n in MLPS],
)
def test_gradients(name: str) -> None:
    report = check_against_float64(MLPS[name](), _step, [_tokens()], **OPTIONS)
    _check_loops(report, PRIME if name == "prime width" else HIDDEN)


@pytest.mark.parametrize("name", ["prime width", "norm and residual", "fused gate and up"])
def test_in_bfloat16(name: str) -> None:
    mlp, x = MLPS[name]().bfloat16(), _tokens().detach().bfloat16().requires_grad_()
    report = check_against_float64(mlp, _step, [x], **OPTIONS)
    assert kinds(report) == [("mlp", MIXED)], str(report)


@pytest.mark.kernels
def test_under_autocast() -> None:
    mlp = SwiGLU(bias=True)

    def step(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return mlp(x).float().square().mean()

        return loss

    report = check_against_float64(mlp, step, [_tokens()], **OPTIONS)
    assert kinds(report) == [("mlp", MIXED)], str(report)


EXPERTS = {
    "gate and up fused": Form(),
    "gate and up apart, biases": Form(gate="apart", bias=True),
    "an expert without rows": Form(gate="none", routing="empty"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str) -> None:
    """The weights' gradients of all experts, which sums over chunks would hold twice."""
    layer = Experts(EXPERTS[name])
    x = torch.randn(150, expert_models.WIDTH, requires_grad=True)
    report = check_against_float64(layer, _step, [x], **OPTIONS)
    assert {(kind, mode) for kind, mode in kinds(report)} == {("mlp", MIXED)}, str(report)
