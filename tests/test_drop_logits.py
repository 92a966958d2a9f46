"""Under ``logits="drop"`` a step that returns its logits is as lean as one that returns its loss.

Gradients against float64, under Inductor; and the peak of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass.measure import peak_bytes
from tests.checks import check_against_float64, compiled, joint_graph, kinds
from tests.losses import VOCAB, LossModel

pytestmark = pytest.mark.op_by_op

FULL = pytest.mark.full
CHUNK = 64
Step = Callable[[LossModel, Tensor], tuple[Any, ...]]


def _ids(device: str) -> Tensor:
    return torch.randint(0, VOCAB, (4, 43), device=device)  # 172 tokens: the last chunk is ragged


def _ce(logits: Tensor, ids: Tensor) -> Tensor:
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _plain(model: LossModel, ids: Tensor) -> tuple[Any, ...]:
    logits = model.logits(ids)
    return _ce(logits, ids), logits


def _capped(model: LossModel, ids: Tensor) -> tuple[Any, ...]:
    """Soft cap, cast, slice, twice; and per-token values of the same logits, which stay."""
    hidden = model.hidden(ids)
    logits = (torch.tanh(model.head(hidden) / 3.0) * 3.0).float()
    with torch.no_grad():
        right = (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    return _ce(logits, ids), logits, logits[:, :-1], hidden, right, entropy


def _two_heads(model: LossModel, ids: Tensor) -> tuple[Any, ...]:
    hidden = model.hidden(ids)
    one, two = model.head(hidden), model.second(hidden)
    return _ce(one, ids) + _ce(two, ids.roll(1)), one, two


def _tied(model: LossModel, ids: Tensor) -> tuple[Any, ...]:
    logits = F.linear(model.hidden(ids), model.embed.weight)
    return _ce(logits, ids), logits


def _first(returned: tuple[Any, ...]) -> Tensor:
    loss: Tensor = returned[0]
    return loss


def _check(step: Step, device: str, **options: Any) -> mstpass.Report:
    model = LossModel().to(device, options.pop("dtype", torch.float32))
    report = check_against_float64(
        model,
        lambda m: lambda ids: step(m, ids),
        [_ids(device)],
        finish=_first,
        logits="drop",
        chunk_tokens=CHUNK,
        **options,
    )
    assert kinds(report) and set(kinds(report)) == {("lm_head", "fused")}, str(report)
    assert "DroppedLogitsError" in " ".join(report.outcome.notes)
    return report


@pytest.mark.parametrize(
    "step",
    [_capped, *(pytest.param(s, marks=FULL) for s in (_plain, _two_heads, _tied))],
)
def test_gradients(step: Step, device: str) -> None:
    _check(step, device)


@FULL
@pytest.mark.parametrize("step", [_plain, _capped])
def test_gradients_in_bfloat16(step: Step, device: str) -> None:
    _check(step, device, dtype=torch.bfloat16)


@FULL
@pytest.mark.parametrize("step", [_plain, _capped])
def test_gradients_under_autocast(step: Step, device: str) -> None:
    _check(step, device, autocast=device)


@FULL
def test_least_memory(device: str) -> None:
    _check(_capped, device, memory_budget=0.0)


def test_what_stays_is_right(device: str) -> None:
    """Hidden states, accuracy and entropy beside dropped logits are eager's; so are no_grad's."""
    model = LossModel().to(device)
    ids = _ids(device)
    step = compiled(lambda ids: _capped(model, ids), logits="drop", chunk_tokens=CHUNK)
    found, expected = step(ids), _capped(model, ids)
    dropped = [isinstance(value, mstpass.DroppedLogits) for value in found]
    assert dropped == [False, True, True, False, False, False]
    for got, right in zip(found, expected, strict=True):
        if isinstance(got, mstpass.DroppedLogits):
            assert got.shape == right.shape
        else:
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    hidden_too = found[0] + found[3].sin().sum()  # other outputs have their gradients
    grads = torch.autograd.grad(hidden_too, list(model.embed.parameters()))
    right_grads = torch.autograd.grad(
        expected[0] + expected[3].sin().sum(), list(model.embed.parameters())
    )
    torch.testing.assert_close(grads, right_grads, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        for got, right in zip(step(ids), _capped(model, ids), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_lengths_that_vary(device: str) -> None:
    model = LossModel().to(device)
    options = {"logits": "drop", "chunk_tokens": CHUNK, "strict": True}
    step = torch.compile(
        lambda ids: _plain(model, ids), backend="mst", dynamic=True, options=options
    )
    for batch, length in ((4, 43), (3, 60)):
        ids = torch.randint(0, VOCAB, (batch, length), device=device)
        loss, logits = step(ids)
        grad = torch.autograd.grad(loss, model.head.weight)
        right = torch.autograd.grad(_plain(model, ids)[0], model.head.weight)
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-6)
        assert logits.shape == (batch, length, VOCAB)


@pytest.mark.kernels
@pytest.mark.full
def test_the_peak_is_that_of_the_loss_alone() -> None:
    """No logits, and no zeros for their gradient."""
    model = LossModel()
    ids = _ids("cpu")
    peaks = {}
    steps = {
        "loss": compiled(lambda ids: _plain(model, ids)[0], chunk_tokens=CHUNK),
        "drop": compiled(lambda ids: _plain(model, ids), chunk_tokens=CHUNK, logits="drop"),
    }
    for name, step in steps.items():

        def run(step: Callable[..., Any] = step) -> None:
            model.zero_grad()
            returned = step(ids)
            (returned[0] if isinstance(returned, tuple) else returned).backward()

        run()
        peaks[name] = peak_bytes(run)
    assert peaks["drop"] <= 1.02 * peaks["loss"], peaks


def test_explain_says_so() -> None:
    model = LossModel()
    ids = _ids("cpu")

    def step(ids: Tensor) -> tuple[Any, ...]:
        loss, logits = _plain(model, ids)
        return loss, logits, torch.log_softmax(logits, -1)

    report = mstpass.explain(step, ids, options={"logits": "drop", "chunk_tokens": CHUNK})
    (note,) = (note for note in report.outcome.notes if "logits" in note)
    assert "DroppedLogitsError" in note and str(VOCAB) in note
    (rejection,) = (r for r in report.rejections if r.stage == "logits")
    assert "aten._log_softmax" in rejection.reason and rejection.fix
    (first, *_) = mstpass.explain_all(
        lambda ids: _plain(model, ids), ids, options={"logits": "drop"}
    )
    assert any("DroppedLogitsError" in note for note in first.outcome.notes)


def test_the_joint_graph_is_that_of_the_loss_alone() -> None:
    model = LossModel()
    ids = _ids("cpu")
    loss_only = mstpass.explain(lambda ids: _plain(model, ids)[0], ids)
    dropped = mstpass.explain(lambda ids: _plain(model, ids), ids, options={"logits": "drop"})
    assert dropped.details is not None and loss_only.details is not None
    assert [n.name for n in dropped.details.nodes] == [n.name for n in loss_only.details.nodes]
    kept, num_outputs = joint_graph(lambda ids: _plain(model, ids), ids)
    tangents = [n for n in kept.graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
    assert (num_outputs, len(tangents)) == (2, 2)  # what it would have been
