"""Inputs of symbolic length that are views, of one another or inside their storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mstpass
from tests.checks import errors, gradients
from tests.models import TinyLM, next_token_loss
from tests.test_plans_by_length import VOCAB, D, _compiled, _ids

pytestmark = pytest.mark.op_by_op


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return TinyLM(VOCAB, D)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=pytest.mark.kernels), False])
def test_labels_that_start_inside_their_storage(model: nn.Module, kernels: bool) -> None:
    """``contiguous`` of one shifted sequence is a view: a loop that reads it must copy it."""
    head = model.head

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(x).flatten(0, 1), labels.flatten())

    def inputs(length: int) -> list[torch.Tensor]:
        labels = _ids(1, length + 1)[:, 1:].contiguous()
        return [torch.randn(1, length, D, requires_grad=True), labels]

    _check_lengths(loss, inputs, model.head)


def test_ids_and_labels_are_views_of_one_batch(model: nn.Module) -> None:
    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten())

    def inputs(length: int) -> list[torch.Tensor]:
        ids = _ids(1, length + 1)
        return [ids[:, :-1].contiguous(), ids[:, 1:].contiguous()]

    _check_lengths(loss, inputs, model)


def test_a_view_of_an_input_that_is_changed_in_place(model: nn.Module) -> None:
    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ids.remainder_(7)  # changes the labels too
        return nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten())

    def inputs(length: int) -> list[torch.Tensor]:
        ids = _ids(1, length + 1)
        return [ids[:, :-1], ids[:, 1:]]

    _check_lengths(loss, inputs, model, ranges=False)


def test_a_static_view_of_an_input_that_is_changed_in_place(model: nn.Module) -> None:
    def loss(ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        ids.add_(1)  # changes the view too, whose size does not vary
        return next_token_loss(model, ids) * first.sum()

    def inputs(length: int) -> list[torch.Tensor]:
        ids = _ids(1, length) % 100
        torch._dynamo.mark_dynamic(ids, 1)
        return [ids, ids[:, :2]]

    _check_lengths(loss, inputs, model, ranges=False, dynamic=None)


def _check_lengths(
    loss: Callable[..., torch.Tensor],
    inputs_of: Callable[[int], list[torch.Tensor]],
    model: nn.Module,
    ranges: bool = True,
    dynamic: bool | None = True,
) -> None:
    step, before = _compiled(loss, dynamic), len(mstpass.reports())
    for length in (1000, 700, 1024):
        torch.manual_seed(length)
        found = gradients(model, step, inputs_of(length))
        torch.manual_seed(length)
        right = gradients(model, loss, inputs_of(length))
        assert max(errors(found, right)) < 1e-5
    reports = mstpass.reports()[before:]
    if ranges:
        (report,) = reports
        assert report.regions and report.outcome.peaks, str(report)
