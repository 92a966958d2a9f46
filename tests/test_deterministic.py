"""Under ``torch.use_deterministic_algorithms`` two steps give the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mstpass.bench.models import LlamaSize, llama
from tests.checks import check_against_float64, compiled, gradients, kinds

pytestmark = pytest.mark.op_by_op


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_two_steps_give_the_same_bits(device: str) -> None:
    size = LlamaSize(width=32, layers=1, heads=2, mlp_width=96, vocabulary=600, length=67, batch=3)
    model, ids, target = llama(size, torch.device(device))
    loss_of = lambda m: lambda ids, target: m(ids, target)
    report = check_against_float64(model, loss_of, [ids, target], chunk_tokens=40)
    assert {("lm_head", "fused"), ("mlp", "save")} <= set(kinds(report)), report
    step = compiled(loss_of(model), chunk_tokens=40)
    first, second = (gradients(model, step, [ids, target]) for _ in range(2))
    assert all(map(torch.equal, first, second))
