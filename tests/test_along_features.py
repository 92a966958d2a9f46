"""Losses whose logits mix tokens: their loops run along the features, in rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mstpass
from mstpass.bench.axes import SelfDistillation
from mstpass.measure import peak_bytes
from tests.checks import check_against_float64, compiled, kinds, step_of
from tests.losses import REFUSED, VOCAB, LossModel, token_ids

pytestmark = [pytest.mark.sampled(3), pytest.mark.op_by_op]

LEAST = {"memory_budget": 0.0, "chunk_tokens": 128}
TAKEN = (
    "softmax_over_sequence",
    "running_sum_over_tokens",
    "flipped_tokens",
    "mean_of_each_sequence",
)
KERNELS = ("mean_of_each_sequence", "flipped_tokens")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.kernels) if n in KERNELS else n for n in TAKEN]
)
def test_loss(name: str) -> None:
    report = check_against_float64(LossModel(), step_of(REFUSED[name]), [token_ids()], **LEAST)
    assert [kind for kind, _ in kinds(report)] == ["lm_head"], str(report)
    (region,) = report.regions
    assert (region.axis, region.num_tokens, region.num_chunks) == ("features", VOCAB, 4)
    assert report.peak_bytes <= 0.4 * report.baseline_peak_bytes


def test_in_bfloat16() -> None:
    model = LossModel().to(torch.bfloat16)
    step = step_of(REFUSED["flipped_tokens"])
    report = check_against_float64(model, step, [token_ids()], **LEAST)
    assert [region.axis for region in report.regions] == ["features"], str(report)


def test_what_neither_axis_can_take_is_refused_by_name() -> None:
    step = step_of(REFUSED["neighbouring_tokens"])
    report = check_against_float64(LossModel(), step, [token_ids()], **LEAST)
    assert not report.regions
    assert any("picks tokens" in rejection.reason for rejection in report.rejections)


def test_without_a_budget_it_stays_whole() -> None:
    step = step_of(REFUSED["flipped_tokens"])
    report = check_against_float64(LossModel(), step, [token_ids()])
    assert not report.regions


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=[pytest.mark.kernels, pytest.mark.full])]
)
def test_self_distillation(kernels: bool) -> None:
    model = SelfDistillation(24, 600, views=4)
    inputs = [torch.randn(4 * 13, 24), torch.randn(2 * 13, 24)]
    report = check_against_float64(model, lambda m: m, inputs, memory_budget=0.0, chunk_tokens=16)
    assert [region.axis for region in report.regions] == ["features"], str(report)


@pytest.mark.kernels
@pytest.mark.full
def test_the_peak_of_self_distillation() -> None:
    """64 images in 8 views, 16,384 outputs: at most half of Inductor's peak."""
    model = SelfDistillation(128, 16_384, views=8)
    inputs = torch.randn(8 * 64, 128), torch.randn(2 * 64, 128)
    weights = [p for p in model.parameters() if p.requires_grad]

    def peak(step: Callable[..., Tensor]) -> int:
        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(step(*inputs), weights)

        run()
        return peak_bytes(run, "cpu")

    whole = peak(torch.compile(model))
    ours = peak(compiled(model, memory_budget=0.0))
    report = mstpass.reports()[-1]
    assert [region.axis for region in report.regions] == ["features"], str(report)
    assert ours <= 0.5 * whole, (ours, whole)
