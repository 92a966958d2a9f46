"""A compiled optimizer's step keeps no temporaries, and gives eager's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mstpass.bench.optimizer import OPTIMIZERS
from mstpass.measure import peak_bytes

FULL = pytest.mark.full


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(256, 256, dtype=dtype)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=FULL)])
@pytest.mark.parametrize(
    "name", [n if n == "AdamW" else pytest.param(n, marks=FULL) for n in OPTIMIZERS]
)
def test_no_temporaries(name: str, dtype: torch.dtype) -> None:
    theirs, ours = _parameters(dtype), _parameters(dtype)
    optimizer = OPTIMIZERS[name](theirs, foreach=True)
    other = OPTIMIZERS[name](ours, foreach=True)
    update = torch.compile(other.step, backend="mst")
    for _ in range(3):
        optimizer.step()
        update()
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    size = sum(p.nbytes for p in ours)
    assert peak_bytes(update) <= 0.01 * size
    if name.startswith("AdamW"):
        assert peak_bytes(optimizer.step) >= size, "foreach needs no more: drop the advice"
