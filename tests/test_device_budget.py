"""The budget "auto" on a CUDA device: its free memory, less a reserve for the optimizer."""

from __future__ import annotations

import pytest
import torch

from mstpass.memory import device_budget
from mstpass.options import Options


def test_auto_on_cuda_is_what_is_free_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    parameter = torch.nn.Parameter(torch.zeros(gib // 8, device="meta"))

    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)

    inputs = [torch.zeros(1).as_subclass(OnCuda), parameter]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * gib)
    monkeypatch.setattr(device_budget, "_optimizers_that_stepped", set())
    budget = lambda **given: (
        device_budget.with_device_budget(Options(**given), inputs).memory_budget
    )
    assert budget() == 11 * gib  # 10 free + 2 cached - 1 for the states to come
    assert budget(reserve="4GiB") == 8 * gib
    assert budget(memory_budget="free") == "free"
    assert budget(reserve=2**40) == 1, "nothing left: the least memory, with a warning"
    device_budget._optimizers_that_stepped.add("Adam")
    assert budget() == 12 * gib
    on_cpu = device_budget.with_device_budget(Options(), [torch.zeros(1), parameter])
    assert on_cpu.memory_budget == "auto"


def test_an_optimizers_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_budget, "_optimizers_that_stepped", set())
    device_budget.watch_optimizers()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    assert device_budget._optimizers_that_stepped == {"SGD"}
