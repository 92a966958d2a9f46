"""Narrow values that several regions, or one region in two roles, read; dims of size 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from tests.checks import check_against_float64, kinds
from tests.graphs_of_steps import check_same_results
from tests.values_along_axes import MODELS

pytestmark = pytest.mark.op_by_op
LEAST = {"memory_budget": 0.0, "strict": True}
VOCAB, DIM = 600, 16


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, VOCAB, bias=False)


def _same_labels(head: Head, hidden: Iterable[Tensor], ids: Tensor) -> Tensor:
    each = (F.cross_entropy(head.linear(h), ids) for h in hidden)
    return torch.stack(list(each)).sum()


def _own_labels(head: Head, hidden: Iterable[Tensor], ids: Tensor) -> Tensor:
    each = (F.cross_entropy(head.linear(h), ids.roll(i)) for i, h in enumerate(hidden))
    return torch.stack(list(each)).sum()


def test_heads_with_the_same_labels_have_loops_of_their_own() -> None:
    """Heads of values of their own: those of one value's windows are one (test_hand_chunks.py)."""
    head, ids = Head(), torch.randint(VOCAB, (512,))
    hidden = [torch.randn(512, DIM) for _ in range(3)]
    reports = [
        mstpass.explain(lambda i, *h, loss=loss: loss(head, h, i), ids, *hidden, options=LEAST)
        for loss in (_same_labels, _own_labels)
    ]
    assert kinds(reports[0]) == [("lm_head", "fused")] * 3
    assert reports[0].peak_bytes <= 1.1 * reports[1].peak_bytes


def test_heads_whose_logits_meet_have_one_loop() -> None:
    head, hidden = Head(), torch.randn(2, 512, DIM)

    def step(hidden: Tensor) -> Tensor:
        return F.softplus(head.linear(hidden[0]) - head.linear(hidden[1])).sum()

    assert len(mstpass.explain(step, hidden, options=LEAST).regions) == 1


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(24, DIM)


def _scaled_by_labels(model: Pairs, x: Tensor, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    kind = t % 7
    same = kind[:, None] == kind[None, :]
    scores = (model.encoder(x) @ z.T) * (1 + same.to(x.dtype))
    return F.cross_entropy(scores, labels)


def _pairs() -> tuple[Tensor, ...]:
    return torch.randn(256, 24), torch.randn(256, DIM), torch.randint(50, (256,)), torch.arange(256)


def test_labels_of_rows_and_of_columns() -> None:
    model = Pairs()
    step = lambda *batch: _scaled_by_labels(model, *batch)
    report = mstpass.explain(step, *_pairs(), options={"chunk_tokens": 64, "strict": True})
    assert kinds(report) == [("lm_head", "fused")], str(report)


def test_what_the_loop_computes_is_not_read_whole() -> None:
    """Each row's sum is known only when the loop has computed it."""

    def loss(model: Pairs, x: Tensor, z: Tensor, *_: Tensor) -> Tensor:
        sums = (model.encoder(x) @ z.T).logsumexp(-1)
        return (sums[:, None] - sums[None, :]).sigmoid().mean()

    check_against_float64(
        Pairs(), lambda model: lambda *batch: loss(model, *batch), list(_pairs()), chunk_tokens=64
    )


def test_gradients_of_pairs() -> None:
    check_against_float64(
        Pairs(),
        lambda model: lambda *batch: _scaled_by_labels(model, *batch),
        list(_pairs()),
        chunk_tokens=64,
    )


@pytest.mark.parametrize("model", MODELS)
def test_values_that_no_loop_can_cut_stay_one(model: type[Any]) -> None:
    """Also of two dims of which a loop can cut one alone: nothing is written twice for the other.

    The recursion has more steps than its structure could be followed by recursion.
    """
    torch.manual_seed(0)
    step = lambda model: lambda *batch: model(*batch)
    given = {"chunk_tokens": 64, **LEAST}
    report = check_against_float64(model(), step, model.inputs(), **given)
    assert sorted(kind for kind, _ in kinds(report)) == MODELS[model], str(report)
    assert report.peak_bytes < report.baseline_peak_bytes


@pytest.mark.parametrize("batch", [1, 2])
def test_a_dim_of_size_one_between_token_dims(batch: int) -> None:
    head, hidden = Head(), torch.randn(4, batch, 64, DIM)
    ids = torch.randint(VOCAB, (4, batch, 63))

    def step(hidden: Tensor, ids: Tensor) -> Tensor:
        logits = head.linear(hidden)[..., :-1, :]
        return F.cross_entropy(logits.flatten(0, 2), ids.flatten())

    assert check_same_results(step, hidden, ids)
    report = mstpass.explain(step, hidden, ids, options={"chunk_tokens": 64, "strict": True})
    assert kinds(report) == [("lm_head", "fused")], str(report)


def test_a_slice_of_every_second_token_stays() -> None:
    head, hidden = Head(), torch.randn(4, 1, 64, DIM)
    step = lambda hidden: head.linear(hidden)[..., ::2, :].logsumexp(-1).sum()
    assert not check_same_results(step, hidden)
