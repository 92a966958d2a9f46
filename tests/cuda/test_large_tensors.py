"""Offsets into tensors of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cuda.dry_run import DryRun, dry_run
from tests.cuda.generated_code import kernels_in_32_bits
from tests.cuda.steps import BF16

pytestmark = pytest.mark.dry_run

TOKENS, WIDTH = 600_064, 4096  # 1.14 x 2^31 elements


def _compiled(budget: object) -> DryRun:
    """A norm, an MLP and a residual, with labels that only some tokens have."""
    with torch.device("meta"):
        norm, last = (nn.RMSNorm(WIDTH, dtype=BF16) for _ in range(2))
        up = nn.Linear(WIDTH, 4 * WIDTH, False, dtype=BF16)
        down = nn.Linear(4 * WIDTH, WIDTH, False, dtype=BF16)
        head = nn.Linear(WIDTH, 512, False, dtype=BF16)
        x = torch.empty(1, TOKENS, WIDTH, dtype=BF16, requires_grad=True)
        labels = torch.empty(1, TOKENS, dtype=torch.long)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        x = last(x + down(F.silu(up(norm(x)))))
        return F.cross_entropy(head(x).float().flatten(0, 1), labels.flatten())

    return dry_run(step, (x, labels), gpu="a100", memory_budget=budget)


@pytest.mark.parametrize("budget", [0.0, pytest.param("free", marks=pytest.mark.full)])
def test_kernels_compute_offsets_in_64_bits(budget: object) -> None:
    run = _compiled(budget)
    assert run.report.regions
    assert run.loops
    assert not [name for code in run.code.modules for name in kernels_in_32_bits(code)]
    narrow = [code.replace(".to(tl.int64)", "") for code in run.code.modules]
    assert any(map(kernels_in_32_bits, narrow))
