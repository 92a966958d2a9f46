"""`mstpass.fits`: the numbers behind yes or no."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass.errors import UserError

V, D, N = 4096, 128, 2048
MIB = 2**20


def _step():
    with torch.device("meta"):
        head = torch.nn.Linear(D, V, bias=False)
        hidden, labels = torch.empty(N, D), torch.empty(N, dtype=torch.long)
    return lambda hidden, labels: F.cross_entropy(head(hidden), labels), hidden, labels


def test_the_numbers_add_up():
    found = mstpass.fits(*_step(), overhead="100MiB")
    assert found and found.gpu == "h100"
    assert found.memory_bytes == mstpass.gpus.gpu("h100").memory_bytes
    assert found.inputs_bytes == pytest.approx(4 * (V * D + N * D) + 8 * N, abs=2048)
    assert found.states_bytes == 2 * 4 * V * D
    assert found.step_bytes == found.report.peak_bytes >= 4 * V * D
    parts = found.inputs_bytes, found.states_bytes, found.step_bytes, found.overhead_bytes
    assert found.peak_bytes == sum(parts)
    assert str(found) == found.text and found.text.startswith("yes: ")
    assert len(found.text.splitlines()) == 2


def test_a_plan_that_fits_is_found_and_a_smaller_gpu_is_too_small():
    free = mstpass.fits(*_step(), overhead=0, optimizer="sgd")
    less = mstpass.fits(*_step(), overhead=0, optimizer="sgd", memory=free.peak_bytes - 4 * MIB)
    assert less and less.step_bytes < free.step_bytes
    never = mstpass.fits(*_step(), overhead=0, optimizer="sgd", memory="2MiB")
    assert not never and "too much" in never.text and never.text.startswith("no: ")


def test_a_budget_of_the_options_is_kept():
    least = mstpass.fits(*_step(), options={"memory_budget": 0.0})
    assert least.step_bytes < mstpass.fits(*_step()).step_bytes


def test_gradients_may_need_more_than_the_step():
    """All gradients exist when the optimizer steps; none of the data has one."""
    found = mstpass.fits(*_step(), options={"memory_budget": 0.0}, optimizer="adamw-8bit")
    assert found.step_bytes >= 4 * V * D
    assert found.states_bytes == pytest.approx(V * D * 2.03, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "lion"}, "known are adamw"),
        ({"gpu": "h10"}, "did you mean 'h100'"),
        ({"memory": "lots"}, "not a size"),
        ({"options": {"memory_budgets": 1}}, "memory_budget"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises((UserError, mstpass.OptionError), match=message):
        mstpass.fits(*_step(), **wrong)
