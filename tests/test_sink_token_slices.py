"""Slices of logits for a metric sink to the metric, so that the head runs in chunks beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass.graph.joint import JointGraph
from mstpass.normalize import normalized
from mstpass.normalize.join_windows import join_windows
from tests.checks import check_against_float64, joint_graph, kinds
from tests.graphs_of_steps import run
from tests.models import TinyLM, next_token_loss

VOCAB, CHUNK = 600, 64
Metrics = tuple[Tensor, ...]


def _accuracy(logits: Tensor, ids: Tensor) -> Metrics:
    return ((logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean(),)


def _entropy_of_flattened(logits: Tensor, ids: Tensor) -> Metrics:
    some = logits[..., :-1, :].contiguous().view(-1, VOCAB)
    log_p = some.log_softmax(-1)
    return (-(log_p.exp() * log_p).sum(-1),)


def _log_probabilities(logits: Tensor, ids: Tensor) -> Metrics:
    return (logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1),)


def _several_windows(logits: Tensor, ids: Tensor) -> Metrics:
    largest = (logits[:, :-1] / 0.7).max(-1)
    best = logits[:, 1:].topk(3, -1).indices
    return largest.values, largest.indices, best, logits[:, 2:-2].logsumexp(-1)


SUNK = (_accuracy, _entropy_of_flattened, _log_probabilities, _several_windows)


def _sum_over_tokens(logits: Tensor, ids: Tensor) -> Metrics:
    return (logits[:, :-1].mean(),)


def _over_the_sequence(logits: Tensor, ids: Tensor) -> Metrics:
    return (logits[:, :-1].softmax(1).argmax(-1),)


def _every_second(logits: Tensor, ids: Tensor) -> Metrics:
    return (logits[:, ::2].argmax(-1),)


STAY = (_sum_over_tokens, _over_the_sequence, _every_second)


def _step(model: TinyLM, metrics: Callable[[Tensor, Tensor], Metrics]) -> Callable[..., Any]:
    def step(ids: Tensor) -> tuple[Tensor, ...]:
        logits = model.logits(ids).float()
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
        with torch.no_grad():
            found = metrics(logits, ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), *found

    return step


@pytest.mark.parametrize("shape", [(4, 43), (1, 160)])
@pytest.mark.parametrize("metrics", SUNK)
def test_the_graph_computes_the_same(
    metrics: Callable[[Tensor, Tensor], Metrics], shape: tuple[int, int]
) -> None:
    step = _step(TinyLM(VOCAB, 32), metrics)
    joint = JointGraph(*joint_graph(step, torch.randint(VOCAB, shape)))
    sunk, names = join_windows(joint)
    assert names and sunk is not joint
    results = run(sunk.module)
    assert len(results) > 1
    for got, right in zip(results, run(joint.copy().module), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("metrics", SUNK)
def test_the_head_is_taken(metrics: Callable[[Tensor, Tensor], Metrics]) -> None:
    step = _step(TinyLM(VOCAB, 32), metrics)
    ids = torch.randint(VOCAB, (4, 43))
    report = mstpass.explain(step, ids, options={"chunk_tokens": CHUNK, "strict": True})
    assert kinds(report) == [("lm_head", "fused")], str(report)


@pytest.mark.parametrize("metrics", STAY)
def test_what_mixes_tokens_stays(metrics: Callable[[Tensor, Tensor], Metrics]) -> None:
    step = _step(TinyLM(VOCAB, 32), metrics)
    joint = JointGraph(*joint_graph(step, torch.randint(VOCAB, (4, 43))))
    _, names = join_windows(joint)
    assert not names


def test_other_graphs_are_left_alone() -> None:
    model = TinyLM(VOCAB, 32)
    ids = torch.randint(VOCAB, (4, 43))
    joint = JointGraph(*joint_graph(lambda ids: next_token_loss(model, ids), ids))
    _, prepared, _ = normalized(joint)
    sunk, names = join_windows(prepared)
    assert sunk is prepared and not names


@pytest.mark.full
@pytest.mark.parametrize("metrics", SUNK)
def test_gradients(metrics: Callable[[Tensor, Tensor], Metrics], device: str) -> None:
    report = check_against_float64(
        TinyLM(VOCAB, 32).to(device),
        lambda model: _step(model, metrics),
        [torch.randint(VOCAB, (4, 43), device=device)],
        finish=lambda returned: returned[0],
        chunk_tokens=CHUNK,
    )
    assert kinds(report) == [("lm_head", "fused")], str(report)
