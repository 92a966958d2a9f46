"""Saved values that wait on the host, emulated on the CPU: gradients, budgets, plans, reports."""

from __future__ import annotations

import pytest
import torch

from mstpass.bench.models import LlamaSize, llama
from tests.checks import check_against_float64
from tests.host_on_cpu import host_on_cpu

pytestmark = pytest.mark.op_by_op

SIZE = LlamaSize(64, 4, 4, 160, 300, 512)


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7])
def test_gradients_are_those_of_eager(budget: float) -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    with host_on_cpu() as copies:
        report = check_against_float64(
            model,
            lambda model: lambda ids, target: model(ids, target),
            [ids, target],
            memory_budget=budget,
            host_budget="1GiB",
        )
        plan = report.outcome.save_plan
        assert plan is not None and plan.host_bytes
        assert copies.offloaded == copies.reloaded > 0
