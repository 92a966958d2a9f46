"""Sections of the vocabulary for losses that are not one scalar, or that pick several words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import Refusal
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.sections import sections_of
from mstpass.normalize import normalized
from mstpass.normalize.sums_over_tokens import row_sums_of_gradients
from mstpass.passes.runner import PassRunner
from mstpass.problem.problem import FUSED, MIXED
from mstpass.regions.detect import find_regions
from tests.checks import (
    check_against_float64,
    check_batches,
    joint_graph,
    kinds,
    step_of,
)
from tests.losses import OUTSIDE, RECOMPUTED, VOCAB, Loss, LossModel, batches_of_lengths, token_ids
from tests.test_picked_logits import PICKED
from tests.test_sections import OPTIONS

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.op_by_op,
    pytest.mark.usefixtures("mixed_solver"),
]


def _labels(ids: Tensor) -> Tensor:
    return ids.roll(-1, 1)


# ---- losses that are finished outside ------------------------------------------------------------
def _policy(model: LossModel, ids: Tensor, temperature: float = 0.7) -> Tensor:
    """Log-probability and entropy of each token."""
    logp = torch.log_softmax(model.logits(ids).float() / temperature, -1)
    chosen = logp.gather(-1, _labels(ids).unsqueeze(-1)).squeeze(-1)
    return chosen * ids.cos() - 0.3 * (logp.exp() * logp).sum(-1)


def _divergence(model: LossModel, ids: Tensor) -> Tensor:
    hidden = model.hidden(ids)
    logp = torch.log_softmax(model.head(hidden).float(), -1)
    reference = torch.log_softmax(model.reference(hidden.detach()).float(), -1)
    return (logp.exp() * (logp - reference)).sum(-1)


def _smoothed(model: LossModel, ids: Tensor) -> Tensor:
    logits, labels = model.logits(ids).float().flatten(0, 1), _labels(ids).flatten()
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")


def _capped(model: LossModel, ids: Tensor) -> Tensor:
    logits = 3 * torch.tanh(model.logits(ids).float() / 3).flatten(0, 1)
    weights, labels = model.class_weight.to(logits.dtype), _labels(ids).flatten()
    loss = F.cross_entropy(logits, labels, weight=weights, reduction="none")
    return loss + 1e-3 * logits.logsumexp(-1).square()


def _collision(model: LossModel, ids: Tensor) -> Tensor:
    return model.logits(ids).float().softmax(-1).square().sum(-1)


def _masked(model: LossModel, ids: Tensor) -> Tensor:
    """Words that a mask forbids, another one for each token, have no probability."""
    allowed = (ids.unsqueeze(-1) + torch.arange(VOCAB, device=ids.device)) % 3 != 0
    logp = model.logits(ids).float().masked_fill(~allowed, -1e4).log_softmax(-1)
    return logp.gather(-1, ((ids * 0).unsqueeze(-1) + ids.unsqueeze(-1) * 2 + 1) % VOCAB)


PER_TOKEN: dict[str, Loss] = {
    **OUTSIDE,
    "policy": _policy,
    "divergence": _divergence,
    "smoothed": _smoothed,
    "capped": _capped,
    "collision": _collision,
    "masked": _masked,
}
KERNELS = ("policy",)


def _weighted(value: Tensor) -> Tensor:
    weights = 1 + 0.5 * torch.arange(value.numel(), device=value.device).cos()
    return (value.flatten() * weights).mean()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.kernels) if n in KERNELS else n for n in PER_TOKEN],
)
def test_a_gradient_of_each_token(name: str) -> None:
    step = step_of(PER_TOKEN[name])
    report = check_against_float64(LossModel(), step, [token_ids()], finish=_weighted, **OPTIONS)
    assert kinds(report) == [("lm_head", MIXED)], str(report)


def test_preferences_of_sequences() -> None:
    report = check_against_float64(
        LossModel(), step_of(RECOMPUTED["preference"]), [token_ids()], **OPTIONS
    )
    assert kinds(report) == [("lm_head", MIXED)], str(report)


@pytest.mark.parametrize("name", ["per_token", "policy", "divergence"])
def test_a_gradient_of_each_token_in_bfloat16(name: str) -> None:
    model = LossModel().to(torch.bfloat16)
    step = step_of(PER_TOKEN[name])
    report = check_against_float64(model, step, [token_ids()], finish=_weighted, **OPTIONS)
    assert kinds(report) == [("lm_head", MIXED)], str(report)


def test_a_sum_that_is_not_linear_in_the_gradient_stays() -> None:
    """The gradient of the gradient's row is no sum of products that the forward knows."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient.square()

    def loss(ids: Tensor) -> Tensor:
        logp = torch.log_softmax(model.logits(ids).float(), -1)
        return Squared.apply(logp).cos().sum(-1)

    model = LossModel()
    joint = JointGraph(*joint_graph(loss, token_ids()))
    assert row_sums_of_gradients(joint) == (joint, frozenset())
    (region, *_), _ = find_regions(joint)
    found = sections_of(RegionFacts(joint, region), region.fused)
    assert isinstance(found, Refusal) and "sum over all features" in found.reason


# ---- several words of a token --------------------------------------------------------------------
def _several(model: LossModel, ids: Tensor, count: int = 3, flips: bool = False) -> Tensor:
    """A margin between the log-probabilities of several words; of some tokens one comes twice."""
    logits = model.logits(ids).float()
    logp = (logits.flip(1) if flips else logits).log_softmax(-1)
    words = torch.stack([(n + 1) * ids % VOCAB for n in range(count)], -1)
    return F.softplus(logp.gather(-1, words).diff(dim=-1)).mean()


def _two_labels(model: LossModel, ids: Tensor, flips: bool = False) -> Tensor:
    logits = model.logits(ids).float()
    logp = (logits.flip(1) if flips else logits).log_softmax(-1)
    first, second = (logp.gather(-1, words.unsqueeze(-1)) for words in (ids, 7 * ids % VOCAB))
    return -F.logsigmoid(first - second).mean()


PICKS: dict[str, Loss] = {
    "several": _several,
    "two_labels": _two_labels,
    "topk": PICKED["topk"],
    "hinge": PICKED["hinge"],
    "gathered": PICKED["gathered"],
    "top_k_of_all": PICKED["top_k_of_all"],
}


@pytest.mark.parametrize("name", PICKS)
def test_several_words_in_sections(name: str) -> None:
    report = check_against_float64(LossModel(), step_of(PICKS[name]), [token_ids()], **OPTIONS)
    assert ("lm_head", MIXED) in kinds(report), str(report)


@pytest.mark.parametrize("name", ["several", "two_labels"])
def test_several_words_in_bfloat16(name: str) -> None:
    model = LossModel().to(torch.bfloat16)
    report = check_against_float64(model, step_of(PICKS[name]), [token_ids()], **OPTIONS)
    assert kinds(report) == [("lm_head", MIXED)], str(report)


def test_many_words_are_scattered_in_the_fused_loop() -> None:
    step = step_of(partial(_several, count=40))
    report = check_against_float64(LossModel(), step, [token_ids()], **OPTIONS)
    assert kinds(report) == [("lm_head", FUSED)], str(report)
    joint = JointGraph(*joint_graph(step(LossModel()), token_ids()))
    _, joint, _ = normalized(joint, False, PassRunner("off"))
    (region, *_), _ = find_regions(joint)
    found = sections_of(RegionFacts(joint, region), True)
    assert isinstance(found, Refusal)
    assert "scatter_add.default works along a dim of features" in found.reason


# ---- along the features --------------------------------------------------------------------------
LEAST = {"memory_budget": 0.0, "chunk_tokens": 128}
ALONG: dict[str, Loss] = {
    "several": partial(_several, flips=True),
    "two_labels": partial(_two_labels, flips=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param("several", marks=[pytest.mark.kernels, pytest.mark.full]), "two_labels"]
)
def test_several_words_along_features(name: str) -> None:
    report = check_against_float64(LossModel(), step_of(ALONG[name]), [token_ids()], **LEAST)
    assert [region.axis for region in report.regions] == ["features"], str(report)
    assert report.peak_bytes <= 0.4 * report.baseline_peak_bytes


def test_many_words_along_features_are_refused_by_name() -> None:
    step = step_of(partial(_several, count=40, flips=True))
    report = check_against_float64(LossModel(), step, [token_ids()], **LEAST)
    assert not report.regions
    assert any(
        "rev.default works along a token dim" in rejection.reason for rejection in report.rejections
    ), str(report)


# ---- any number of tokens ------------------------------------------------------------------------
def _any_length(loss: Loss, batches: Iterable[list[Tensor]], **options: object) -> None:
    """In each plan of a graph the loops for weights are over features."""
    reports = check_batches(LossModel(), step_of(loss), batches, finish=_weighted, **options)
    axes = [[region.loops[-1].cut.axis for region in report.regions] for report in reports]
    assert axes == [["features"]] * len(reports), str(reports[-1])


@pytest.mark.parametrize("name", ["policy", "capped"])
def test_any_number_of_tokens_with_a_gradient_each(name: str) -> None:
    _any_length(PER_TOKEN[name], batches_of_lengths(), **OPTIONS)


def test_any_number_of_tokens_with_several_words() -> None:
    _any_length(_several, batches_of_lengths(), **OPTIONS)


def test_any_number_of_tokens_along_features() -> None:
    _any_length(ALONG["two_labels"], batches_of_lengths(), **LEAST)


@pytest.mark.kernels
def test_any_number_of_tokens_along_features_in_kernels() -> None:
    """Two batches, which one plan serves."""
    _any_length(ALONG["several"], [*batches_of_lengths()][:2], **LEAST)
