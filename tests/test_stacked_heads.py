"""Stacked wide values are computed part by part: no stack exists, and each head is in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from tests.checks import check_against_float64, kinds
from tests.graphs_of_steps import check_same_results

pytestmark = [pytest.mark.sampled(8), pytest.mark.op_by_op]
VOCAB, DIM, TOKENS = 600, 16, 96
CHUNKS = {"chunk_tokens": 64, "strict": True}


class Heads(nn.Module):
    def __init__(self, count: int = 3):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(DIM, VOCAB, bias=False) for _ in range(count))

    def logits(self, hidden: Tensor) -> list[Tensor]:
        return [head(hidden) for head in self.heads]


Loss = Callable[[list[Tensor], Tensor], Tensor]


def _each(logits: Any, ids: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(3):
        total = total + F.cross_entropy(logits[i].flatten(0, -2), ids.roll(-i).flatten())
    return total


def _selected(logits: list[Tensor], ids: Tensor) -> Tensor:
    return _each(torch.stack(logits), ids)


def _unbound(logits: list[Tensor], ids: Tensor) -> Tensor:
    return _each(torch.stack(logits).unbind(), ids)


def _after_the_tokens(logits: list[Tensor], ids: Tensor) -> Tensor:
    return _each(torch.stack(logits, -2).unbind(-2), ids)


def _split(logits: list[Tensor], ids: Tensor) -> Tensor:
    return _each(torch.cat(logits).split(len(logits[0])), ids)


def _one_loss_of_all(logits: list[Tensor], ids: Tensor) -> Tensor:
    labels = torch.stack([ids.roll(-i) for i in range(3)])
    return 3 * F.cross_entropy(torch.stack(logits).flatten(0, -2), labels.flatten())


def _log_softmax_of_all(logits: list[Tensor], ids: Tensor) -> Tensor:
    labels = torch.stack([ids.roll(-i) for i in range(3)])
    log_p = torch.stack(logits).log_softmax(-1)
    return -log_p.gather(-1, labels.unsqueeze(-1)).mean()


def _shifted(logits: list[Tensor], ids: Tensor) -> Tensor:
    stacked = torch.stack(logits)[..., 1:, :]
    return F.cross_entropy(stacked.flatten(0, -2), torch.stack([ids[..., 1:]] * 3).flatten())


def _mean(logits: list[Tensor], ids: Tensor) -> Tensor:
    mean = torch.stack([each.softmax(-1) for each in logits]).mean(0)
    return F.nll_loss(mean.log().flatten(0, -2), ids.flatten())


def _mixture(logits: list[Tensor], ids: Tensor) -> Tensor:
    student, teacher = (each.log_softmax(-1) for each in logits[:2])
    mixed = torch.logsumexp(torch.stack([student, teacher]), 0) - math.log(2)
    return F.kl_div(mixed, student, reduction="sum", log_target=True) / ids.numel()


APART = (
    _selected,
    _unbound,
    _after_the_tokens,
    _split,
    _one_loss_of_all,
    _log_softmax_of_all,
    _shifted,
)
TOGETHER = (_mean, _mixture)


def _step(model: Heads, loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda hidden, ids: loss(model.logits(hidden), ids)


def _batch(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, DIM), torch.randint(VOCAB, shape)


@pytest.mark.parametrize("shape", [(TOKENS,), (2, 48)], ids=str)
@pytest.mark.parametrize("loss", [*APART, *TOGETHER])
def test_the_graph_computes_the_same(loss: Loss, shape: tuple[int, ...]) -> None:
    assert check_same_results(_step(Heads(), loss), *_batch(*shape))


@pytest.mark.parametrize("loss", APART)
def test_each_head_is_a_region(loss: Loss) -> None:
    report = mstpass.explain(_step(Heads(), loss), *_batch(2, 256), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")] * 3, str(report)
    assert not report.rejections


@pytest.mark.parametrize("loss", [_selected, _one_loss_of_all])
def test_the_peak_is_that_of_a_list(loss: Loss) -> None:
    batch = _batch(512)
    peaks = [
        mstpass.explain(_step(Heads(), each), *batch, options=CHUNKS).peak_bytes
        for each in (loss, _each)
    ]
    numbers_bytes = 3 * 512 * 8 * 4  # labels, and numbers of each token, of all heads together
    assert peaks[0] <= 1.01 * peaks[1] + numbers_bytes


@pytest.mark.parametrize("loss", TOGETHER)
def test_a_reduction_over_the_stack_makes_one_region(loss: Loss) -> None:
    report = mstpass.explain(_step(Heads(), loss), *_batch(512), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")], str(report)


def test_a_symbolic_number_of_tokens() -> None:
    model = Heads()

    def loss(hidden: Tensor, ids: Tensor) -> Tensor:
        stacked = torch.stack(model.logits(hidden))
        return F.cross_entropy(stacked[0], ids) + F.cross_entropy(stacked[2], ids)

    step = torch.compile(loss, backend="mst", options=CHUNKS)
    for tokens in (TOKENS, 130):
        hidden, ids = _batch(tokens)
        for each in (hidden, ids):
            torch._dynamo.mark_dynamic(each, 0)
        torch.testing.assert_close(step(hidden, ids), loss(hidden, ids))
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")] * 2


def test_a_stack_that_is_returned_stays() -> None:
    model = Heads(2)

    def step(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack(model.logits(hidden))
        return F.cross_entropy(stacked[0], ids), stacked.detach()

    changed = check_same_results(step, *_batch(TOKENS))  # but for the gather of the labels' words
    assert not any("mm" in name or "stack" in name or "cat" in name for name in changed)


def test_a_stack_mixed_along_the_tokens_stays() -> None:
    model = Heads(2)

    def step(hidden: Tensor, ids: Tensor) -> Tensor:
        return torch.cat(model.logits(hidden)).cumsum(0).square().sum()

    assert not check_same_results(step, *_batch(TOKENS))


def test_features_side_by_side_stay() -> None:
    """A loop over tokens holds all of a token's features in any case."""
    model = Heads(2)

    def step(hidden: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(torch.cat(model.logits(hidden), -1), ids)

    assert not check_same_results(step, *_batch(TOKENS))
    report = mstpass.explain(step, *_batch(512), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")], str(report)


@pytest.mark.parametrize("loss", [_selected, _one_loss_of_all, _mixture])
def test_gradients(loss: Loss, device: str) -> None:
    check_against_float64(
        Heads().to(device),
        lambda model: _step(model, loss),
        [each.to(device) for each in _batch(TOKENS)],
        chunk_tokens=32,
    )
