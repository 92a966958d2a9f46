"""What looks at a step changes nothing: gradients, buffers, weights, modes, random states."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass

BATCH = torch.randn(8, 4)


class _Model(nn.Module):
    """It writes to buffers (a batch norm's, unseen by dispatch, and its own), and to attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.losses = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add_(len(x))
        h = F.dropout(self.norm(self.up(x)), 0.5)
        loss = self.down(h.relu()).square().mean()
        self.losses.append(loss)
        return loss


class _Step:
    """A whole step, as users write it; it may end in an error."""

    def __init__(self, compiled: str = "", fails: bool = False):
        self.model, self.fails = _Model(), fails
        self.run = torch.compile(self.model, backend=compiled) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.average = torch.zeros(4)
        self.noise = torch.Generator()

    def function(self) -> Callable[[Tensor], None]:
        model, optimizer, schedule = self.model, self.optimizer, self.schedule
        run, average, noise, fails = self.run, self.average, self.noise, self.fails

        def step(x: Tensor) -> None:
            model.train()
            average.mul_(0.9).add_(x.mean(0))
            x = x * random.random() + np.random.rand() + torch.rand((), generator=noise)
            run(x).backward()
            optimizer.step()
            schedule.step()
            model.up.bias.requires_grad_(False)
            model.register_forward_hook(lambda *_: None)
            torch.set_grad_enabled(False)
            if fails:
                raise ZeroDivisionError("on purpose")

        return step

    def state(self) -> Any:
        model = self.model
        modes = [(m.training, len(m._forward_hooks)) for m in model.modules()]
        leaves = [
            (p.requires_grad, p.grad if p.grad is None else p.grad.clone())
            for p in model.parameters()
        ]
        of_optimizer = copy.deepcopy((self.optimizer.state_dict(), self.schedule.state_dict()))
        randoms = torch.get_rng_state(), random.getstate(), np.random.get_state()
        others = model.calls, len(model.losses), self.average.clone(), torch.is_grad_enabled()
        return (
            copy.deepcopy(model.state_dict()),
            modes,
            leaves,
            of_optimizer,
            randoms,
            others,
            self.noise.get_state(),
        )


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return bool((found == expected).all())
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_lint_leaves_a_whole_step_as_it_was(has_gradients: bool, fails: bool) -> None:
    own = _Step(fails=fails)
    if has_gradients:  # and states of the optimizer
        own.model(BATCH).backward()
        own.optimizer.step()
    own.model.eval()
    gradients = [p.grad for p in own.model.parameters()]
    before = own.state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            mstpass.lint(own.function(), BATCH)
    else:
        assert mstpass.lint(own.function(), BATCH).step_flops
    assert _equal(own.state(), before)
    assert all(p.grad is g for p, g in zip(own.model.parameters(), gradients, strict=True))


def test_what_is_kept_is_what_the_step_changes() -> None:
    """The negative twin: without `lint`, each part of the state is another after the step."""
    own = _Step()
    own.model.eval()
    before = own.state()
    try:
        own.function()(BATCH)
    finally:
        after = own.state()
        torch.set_grad_enabled(True)
    assert not any(map(_equal, after, before))


def test_lint_of_a_module_and_of_its_inputs() -> None:
    model, x = _Model(), BATCH.clone().requires_grad_()
    mstpass.lint(model, x)
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    bound = functools.partial(model, x)
    mstpass.lint(bound)
    assert x.grad is None and model.calls == 0 and not model.norm.num_batches_tracked


def test_lint_compiled_leaves_a_step_as_it_was() -> None:
    own = _Step(compiled="inductor")
    before = own.state()
    assert mstpass.lint_compiled(own.function(), BATCH).step_flops
    assert _equal(own.state(), before)


@pytest.mark.parametrize("explain", [mstpass.explain, mstpass.explain_all])
def test_explain_leaves_a_step_as_it_was(explain: Callable[..., Any]) -> None:
    own = _Step()
    model = own.model
    model(BATCH).backward()
    model.losses.clear()

    breaks = explain is mstpass.explain_all

    @torch.compiler.disable  # runs between two graphs
    def noise() -> Any:
        return random.random() + np.random.rand() + torch.rand(())

    def loss(x: Tensor) -> Tensor:
        h = F.dropout(model.norm(model.up(x)), 0.5)
        h = h + noise() if breaks else h
        return model.down(h.relu()).square().mean()

    before = own.state()
    assert explain(loss, BATCH)
    assert _equal(own.state(), before)
