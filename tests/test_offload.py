"""Saved values that wait on the host, emulated on the CPU: gradients, budgets, policies, errors."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mstpass
from mstpass.bench.models import LlamaSize, llama
from mstpass.limit import MEASURED_OVER_SIMULATED
from mstpass.options import OptionError
from mstpass.partition.build_problem import NoDeviceError
from tests.checks import check_against_float64, compiled
from tests.host_on_cpu import host_on_cpu

pytestmark = [pytest.mark.sampled(2), pytest.mark.op_by_op]

SIZE = LlamaSize(64, 2, 4, 160, 300, 512)


def _loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda ids, target: model(ids, target)


def _square_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x: model(x).square().mean()


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7])
def test_gradients_are_those_of_eager(budget: float) -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    with host_on_cpu() as copies:
        report = check_against_float64(
            model, _loss_of, [ids, target], memory_budget=budget, host_budget="1GiB"
        )
        assert report.outcome.save_plan is not None
        assert report.outcome.save_plan.host_bytes
        assert copies.reloaded >= copies.offloaded > 0  # some are copied back twice


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=str
)
def test_symbolic_lengths(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Layers(layers=4).to(dtype)
    with host_on_cpu() as copies:
        step = torch.compile(
            lambda x: model(x).float().square().mean(),
            backend="mst",
            options={"memory_budget": 0.0, "host_budget": "1GiB", "strict": True},
        )
        for tokens in (96, 101):  # a second length, which no chunk divides
            x = torch.randn(2, tokens, 32, dtype=dtype)
            torch._dynamo.mark_dynamic(x, 1)
            before = copies.offloaded
            step(x).backward()
            ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            model(x).float().square().mean().backward()
            for mine, p in zip(ours, model.parameters(), strict=True):
                assert p.grad is not None
                torch.testing.assert_close(mine, p.grad, rtol=2e-2, atol=2e-3)
            model.zero_grad()
            assert copies.offloaded > before


class Layers(nn.Module):
    """Layers of a fixed width; ``wrap`` calls each of them."""

    def __init__(
        self, wrap: Callable[..., Tensor] = lambda layer, x: layer(x), layers: int = 6
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
            for _ in range(layers)
        )
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.wrap(layer, x)
        return x


def test_a_second_backward_over_the_same_graph() -> None:
    """``retain_graph=True``: what waits on the host is still there after the first backward."""
    torch.manual_seed(0)
    model = Layers()
    x = torch.randn(512, 32)
    with host_on_cpu() as copies, functorch_config.patch(donated_buffer=False):
        step = compiled(_square_of(model), memory_budget=0.0, host_budget="1GiB", chunk="off")
        loss = step(x)
        grads, reloaded = [], []
        for _ in range(2):
            grads.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            reloaded.append(copies.reloaded)
        assert reloaded[1] == 2 * reloaded[0] >= 2 * copies.offloaded > 0
    torch.testing.assert_close(*grads, rtol=0, atol=0)


# ---- policies ----------------------------------------------------------------------------------
def _offload_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _offload_products)
    result: Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    return result


def test_must_cpu_offload_is_honoured_without_a_host_budget() -> None:
    model = Layers(_checkpointed)
    x = torch.randn(512, 32, requires_grad=True)
    with host_on_cpu() as copies:
        report = check_against_float64(model, _square_of, [x], memory_budget="free", chunk="off")
        plan = report.outcome.save_plan
        assert plan is not None and copies.offloaded
        on_host = [value for value in plan.saved if value.on_host]
        assert len(on_host) >= 6 and plan.host_bytes == 512 * 32 * 4 * len(on_host)


@pytest.mark.parametrize("bytes_per_us", [1.0, 1e9], ids=["slow", "fast"])
def test_gradients_whatever_the_speed_of_copies(bytes_per_us: float) -> None:
    """If copies are slow, all of them are waited for at the end, or begun at the start."""
    model = Layers(_checkpointed)
    x = torch.randn(512, 32, requires_grad=True)
    with host_on_cpu(bytes_per_us):
        report = check_against_float64(model, _square_of, [x], memory_budget="free", chunk="off")
        plan = report.outcome.save_plan
        assert plan is not None and plan.transfers
        waits_us = sum(transfer.stall_us for transfer in plan.transfers)
        copies_us = 2 * plan.host_bytes / bytes_per_us
        ops_us = plan.forward_us + plan.backward_us
        assert waits_us == pytest.approx(max(0.0, copies_us - ops_us), rel=0.1, abs=1.0)


def test_must_cpu_offload_saves_on_the_cpu() -> None:
    model = Layers(_checkpointed)
    x = torch.randn(512, 32, requires_grad=True)
    report = check_against_float64(model, _square_of, [x], memory_budget="free", chunk="off")
    plan = report.outcome.save_plan
    assert plan is not None and not plan.transfers and not plan.host_bytes
    assert sum(value.bytes == 512 * 32 * 4 for value in plan.saved) >= 6


# ---- bad input -----------------------------------------------------------------------------------
def test_a_host_budget_on_the_cpu_is_an_error() -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    step = torch.compile(_loss_of(model), backend="mst", options={"host_budget": "1GiB"})
    with pytest.raises(Exception, match=r"host_budget=1.0 GiB: this step has no tensor on a GPU"):
        step(ids, target)
    with pytest.raises(NoDeviceError, match="Leave host_budget out"):
        mstpass.explain(_loss_of(model), ids, target, options={"host_budget": "1GiB"})
    with torch.no_grad():  # nothing is saved there
        step(ids, target)


@pytest.mark.parametrize("value", ["much", -1, True, 1.5, "auto"])
def test_bad_host_budgets(value: object) -> None:
    with pytest.raises(OptionError, match="host_budget"):
        mstpass.Options.parse({"host_budget": value})


@pytest.mark.parametrize(
    "few_ops", [pytest.param(500, marks=pytest.mark.full, id="small"), pytest.param(0, id="large")]
)
def test_a_host_budget_that_is_too_small_names_the_least_that_would_do(
    few_ops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large graphs the search compares fewer plans, and still finds the one that is named."""
    search = importlib.import_module("mstpass.partition.solvers.peak_search")
    monkeypatch.setattr(search, "_FEW_OPS", few_ops)
    model, x = Layers(layers=5), torch.randn(8192, 32, requires_grad=True)

    def peak(**options: object) -> int:
        report = mstpass.explain(_square_of(model), x, options={"chunk": "off", **options})
        assert report.outcome.peak_bytes is not None
        return report.outcome.peak_bytes

    with host_on_cpu(1e6):
        least, with_host = peak(memory_budget=0.0), peak(memory_budget=0.0, host_budget="1GiB")
        assert with_host < least
        limit = with_host + (least - with_host) // 2
        budget = int(MEASURED_OVER_SIMULATED * limit) + 1
        with pytest.warns(UserWarning, match=r"With host_budget=\S+ \S+ or more") as warned:
            peak(memory_budget=budget)
        number, unit, *_ = str(warned[0].message).partition("With host_budget=")[2].split()
        assert peak(memory_budget=budget, host_budget=f"{number}{unit}") <= limit
        with warnings.catch_warnings():  # the peak is above the limit, if not above the budget
            warnings.simplefilter("ignore")
            assert peak(memory_budget=budget, host_budget=f"{0.9 * float(number)}{unit}") > limit


def test_the_least_memory_is_no_more_than_under_a_budget() -> None:
    """With little host memory, the lowest peak is that of a plan between two others."""
    model, x = Layers(layers=6), torch.randn(8192, 32, requires_grad=True)
    with host_on_cpu(1e6):
        peaks = [
            mstpass.explain(
                _square_of(model),
                x,
                options={"chunk": "off", "memory_budget": budget, "host_budget": "3MiB"},
            ).outcome.peak_bytes
            for budget in (0.0, "5.8MiB")
        ]
    assert peaks[0] is not None and peaks[1] is not None
    assert peaks[0] <= peaks[1] < 5.8 * 2**20
