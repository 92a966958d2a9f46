"""The linter's report as text and JSON, and steps that it cannot lint."""

import json

import pytest
import torch
from torch import nn

import mstpass
from mstpass.linter import LintError
from tests.lint_models import MM, NON_REENTRANT, REENTRANT, WIDTH, Model, runs, tokens


def test_the_text_sums_up_layers():
    text = str(mstpass.lint(Model(REENTRANT, NON_REENTRANT), tokens()))
    assert "layers.* (2 of them): nested checkpoints" in text
    assert "1x in forward, recomputed 2x in backward (each)" in text
    assert "4 findings; 30.0% of the step's 20.5 kflop wasted" in text  # 6 of 20 products


def test_paths_of_modules_that_are_called_one_by_one():
    """Paths start at the model that the step holds; equal modules without a model are numbered."""
    model, linears = Model(depth=2), [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    def step(x):
        return model.layers[1](model.layers[0](x)).sum()

    assert set(runs(mstpass.lint(step, tokens()))) >= {"layers.0", "layers.1.down"}
    report = mstpass.lint(lambda x: linears[1](linears[0](x)).sum(), tokens())
    assert set(runs(report)) == {"Linear", "Linear-1"}


def test_json(tmp_path):
    report = mstpass.lint(Model(REENTRANT), tokens())
    report.to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["wasted_flops"] == report.wasted_flops == 2 * MM
    assert data["findings"][0]["module"] == report.findings[0].module
    assert data["modules"][0].keys() == {
        "module",
        "forward_runs",
        "recompute_runs",
        "forward_flops",
        "recompute_flops",
    }


def test_small_findings_can_be_left_out():
    report = mstpass.lint(Model(REENTRANT), tokens())  # two findings of 1/16, summed
    assert report.above(0.12).findings == report.findings
    assert not report.above(0.13).findings


def test_a_step_may_return_its_loss_or_have_run_backward():
    model = Model(NON_REENTRANT)

    def ran():
        loss = model(tokens())
        loss.backward()
        return loss

    assert mstpass.lint(ran).step_flops == mstpass.lint(model, tokens()).step_flops == 14 * MM


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: None, "ran no backward and returned no loss"),
        (lambda: torch.ones(()), "needs no gradient"),
        (tokens, r"shape \[4, 8\]"),
    ],
)
def test_steps_without_a_backward(step, message):
    with pytest.raises(LintError, match=message):
        mstpass.lint(step)


def test_what_the_step_raises_is_passed_on():
    with pytest.raises(ZeroDivisionError):
        mstpass.lint(lambda: 1 / 0)


def test_gradients_are_those_of_the_step():
    model, x = Model(REENTRANT, NON_REENTRANT), tokens()
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    found = []

    def step(x):
        model(x).backward()
        found.extend(p.grad.clone() for p in model.parameters())

    mstpass.lint(step, x)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    assert all(p.grad is None for p in model.parameters())  # and nothing is left behind
