"""Log-probabilities of verl, OpenRLHF and NeMo-RL: right gradients, and the head in chunks.

A vocabulary that ranks share, as in NeMo-RL's from_parallel_logits, is ``test_parallel.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mstpass
from tests.checks import check_against_float64, compiled, kinds, step_of
from tests.losses import LossModel
from tests.models import TinyLM
from tests.rl_losses import (
    INSIDE,
    OUTSIDE,
    batch,
    masked_mean,
    verl_log_probs_in_16_bits,
)

pytestmark = [pytest.mark.sampled(3), pytest.mark.op_by_op]

CHUNK = 128
# Where labels are picked before the responses are cut out, tokens are in the head that are in no
# loss, so the gradient of each token comes from outside of it.
MODES = {"verl": "fused"}


@pytest.mark.parametrize("name", INSIDE)
def test_the_loss_in_the_compiled_function(name: str, device: str) -> None:
    inputs = [value.to(device) for value in batch()]
    model = LossModel().to(device)
    report = check_against_float64(model, step_of(INSIDE[name]), inputs, chunk_tokens=CHUNK)
    assert kinds(report) == [("lm_head", MODES.get(name, "recompute"))], str(report)


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_loss_made_outside(name: str, device: str) -> None:
    log_probs, loss = OUTSIDE[name]
    ids, *given = (value.to(device) for value in batch())
    report = check_against_float64(
        LossModel().to(device),
        step_of(log_probs),
        [ids],
        finish=lambda found: loss(found, given),
        chunk_tokens=CHUNK,
    )
    assert kinds(report) == [("lm_head", "recompute")], str(report)


def test_logits_of_16_bits(device: str) -> None:
    ids, mask, *_ = (value.to(device) for value in batch())
    report = check_against_float64(
        LossModel().to(device, torch.bfloat16),
        step_of(verl_log_probs_in_16_bits),
        [ids],
        finish=lambda found: -masked_mean(found.float(), mask),
        chunk_tokens=CHUNK,
    )
    assert kinds(report) == [("lm_head", "recompute")], str(report)


# Of what verl returns, one value as large as the logits is kept, and its head would need a second
# product to run in chunks: without a budget the plan leaves it whole.
FREE = [*INSIDE, "openrlhf outside", "nemo outside"]
LEAST = [*INSIDE, *(f"{name} outside" for name in OUTSIDE)]


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, None) for name in FREE), *((name, 0.0) for name in LEAST)]
)
def test_many_tokens_run_in_chunks_by_themselves(name: str, budget: float | None) -> None:
    """In the plan that costs nothing, and at the least memory; with no length of chunks given."""
    kind, _, outside = name.partition(" ")
    rows, length = (16, 1025) if budget is None else (8, 513)  # more take long to plan
    inputs = batch(rows, length, vocabulary=32000)
    step = OUTSIDE[kind][0] if outside else INSIDE[kind]
    report = mstpass.explain(
        step_of(step)(TinyLM(32000, 64)),
        *(inputs[:1] if outside else inputs),
        options={} if budget is None else {"memory_budget": budget},
    )
    (region,) = report.regions
    counts = [loop.cut.count for loop in region.loops]
    assert region.kind == "lm_head" and counts and min(counts) > 1, str(report)


def test_micro_batches_add_up_to_the_batch() -> None:
    """As verl accumulates: the gradients of all micro-batches are those of one batch."""
    log_probs, loss = OUTSIDE["verl"]
    model = TinyLM(600, 16)
    inputs = batch()
    parts = [[value[rows] for value in inputs] for rows in (slice(0, 2), slice(2, 4))]
    run = compiled(lambda ids: log_probs(model, ids), chunk_tokens=CHUNK)

    def gradients(function: Callable[[Tensor], Any], *batches: list[Tensor]) -> list[Tensor]:
        model.zero_grad()
        for ids, *given in batches:
            loss(function(ids), given, micro_batches=len(batches)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for ours, right in zip(
        gradients(run, *parts),
        gradients(lambda ids: log_probs(model, ids), *parts),
        strict=True,
    ):
        torch.testing.assert_close(ours, right)
