"""The values that the generated code computes, its kernels interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.checks import errors, in_float64, rms
from tests.cuda.dry_run import dry_run
from tests.cuda.interpret import run_interpreted
from tests.models import GatedMLP

pytestmark = pytest.mark.dry_run

TOKENS, WIDTH, VOCABULARY = 80, 64, 211  # no multiple of a chunk; rows that are not aligned


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x).float(), labels)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), GatedMLP(WIDTH, 4 * WIDTH, "silu")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights = (labels >= 0).unsqueeze(1)
        return (weights * (x + self.mlp(self.norm(x)))).float().square().mean()


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [Head, Layer])
def test_values_are_as_right_as_those_of_eager(
    make: Callable[[], nn.Module], dtype: torch.dtype, symbolic: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[3] = -100
    inputs = [torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_(), labels]
    dim = 0 if symbolic else None
    run = dry_run(lambda *xs: model(*xs), inputs, chunk_tokens=32, dynamic_dim=dim)
    assert run.report.regions
    (loss,), given = run_interpreted(run, tmp_path)
    # A symbolic size is a primal too, whose gradient is None.
    gradients = {id(p): g for p, g in zip(run.primals, given, strict=False) if g is not None}

    exact = _values(*in_float64(model, inputs))
    ours = [loss, *(gradients[id(leaf)] for leaf in (*model.parameters(), inputs[0]))]
    eager = _values(model, inputs)
    assert rms(errors(ours, exact)) <= 1.1 * rms(errors(eager, exact)) + 1e-7


def _values(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    loss = model(*inputs)
    leaves = [*model.parameters(), inputs[0]]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]
