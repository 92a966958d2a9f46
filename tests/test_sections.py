"""Heads in mixed mode: the gradient of the weight in a loop over sections of the vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass import pipeline
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import Refusal
from mstpass.loops.region_facts import RegionFacts
from mstpass.loops.sections import Sections, sections_of
from mstpass.measure import peak_bytes
from mstpass.normalize import normalized
from mstpass.options import Options
from mstpass.passes.runner import PassRunner
from mstpass.problem.problem import MIXED
from mstpass.regions.detect import find_regions
from tests.checks import (
    check_against_float64,
    check_batches,
    compiled,
    gradients,
    joint_graph,
    kinds,
    step_of,
)
from tests.losses import FUSED, Loss, LossModel, batches_of_lengths, token_ids
from tests.test_picked_logits import PICKED

pytestmark = [
    pytest.mark.sampled(6),
    pytest.mark.op_by_op,
    pytest.mark.usefixtures("mixed_solver"),
]

VOCAB = 600
PRIME = 601
CHUNK = 128


OPTIONS = {"solver": "mixed", "memory_budget": 0.5, "chunk_tokens": CHUNK}


KERNELS = ("label_smoothing",)  # compiled by Inductor


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.kernels) if n in KERNELS else n for n in FUSED],
)
def test_loss(name: str) -> None:
    report = check_against_float64(LossModel(), step_of(FUSED[name]), [token_ids()], **OPTIONS)
    assert set(kinds(report)) == {("lm_head", MIXED)}, str(report)
    tokens, sections = report.regions[0].loops
    assert (tokens.phase, tokens.cut.axis) == ("forward", "tokens")
    assert (sections.phase, sections.cut.axis, sections.cut.total) == (
        "backward",
        "features",
        VOCAB,
    )
    assert all(output.spec is not None for output in sections.outputs), "a sum over sections"


@pytest.mark.parametrize("name", ["max", "kthvalue", "by_arange"])
def test_one_pick_of_each_row(name: str) -> None:
    """The gradient of a gather of one element per row is a choice: sections can make it."""
    report = check_against_float64(LossModel(), step_of(PICKED[name]), [token_ids()], **OPTIONS)
    assert kinds(report) == [("lm_head", MIXED)], str(report)


@pytest.mark.parametrize("name", ["mean", "entropy_bonus", "distillation", "bias"])
def test_in_bfloat16(name: str) -> None:
    model = LossModel().to(torch.bfloat16)
    report = check_against_float64(model, step_of(FUSED[name]), [token_ids()], **OPTIONS)
    assert set(kinds(report)) == {("lm_head", MIXED)}, str(report)


@pytest.mark.parametrize(
    "name", ["mean", pytest.param("bias", marks=[pytest.mark.kernels, pytest.mark.full])]
)
def test_any_number_of_tokens_in_one_graph(name: str) -> None:
    reports = check_batches(LossModel(), step_of(FUSED[name]), batches_of_lengths(), **OPTIONS)
    assert reports and all(set(kinds(report)) == {("lm_head", MIXED)} for report in reports)


class Head(nn.Module):
    def __init__(self, words: int, width: int, tied: bool = False):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.words(ids).sin()).float()
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.kernels)])
def test_a_vocabulary_of_prime_size(tied: bool) -> None:
    """The last section overlaps the one before it. Tied rows are added to the embedding's."""
    model, ids = Head(PRIME, 24, tied), torch.randint(0, PRIME, (3, 67))
    report = check_against_float64(model, lambda m: m, [ids], **OPTIONS)
    assert kinds(report) == [("lm_head", MIXED)], str(report)
    chunks = report.regions[0].loops[1].cut
    assert (chunks.total, chunks.length, chunks.count) == (PRIME, 301, 2)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (PICKED["sort"], "aten.scatter.src works along a dim of features"),
        (PICKED["cummax"], "aten.scatter_add.default works along a dim of features"),
        (PICKED["index_select"], "writes at indices along a dim of features"),
    ],
)
def test_what_is_scattered_along_the_vocabulary_is_refused(loss: Loss, reason: str) -> None:
    joint = JointGraph(*joint_graph(step_of(loss)(LossModel()), token_ids()))
    _, joint, _ = normalized(joint, False, PassRunner("off"))
    (region, *_), _ = find_regions(joint)
    found = sections_of(RegionFacts(joint, region), True)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_section_reads_no_whole_logits() -> None:
    """A loss whose gradient needs all words of a token at once has none."""

    def smoothed(model: LossModel, ids: Tensor) -> Tensor:
        logits = model.logits(ids).float()
        return (logits.softmax(-1).cumsum(-1) * logits).sum(-1).mean()

    joint = JointGraph(*joint_graph(step_of(smoothed)(LossModel()), token_ids()))
    _, joint, _ = normalized(joint, False, PassRunner("off"))
    (region, *_), _ = find_regions(joint)
    found = sections_of(RegionFacts(joint, region), True)
    assert isinstance(found, Refusal)
    fused = dataclasses.replace(region, fused=False)
    assert isinstance(sections_of(RegionFacts(joint, fused), False), Refusal)


def test_what_a_section_needs_of_each_token() -> None:
    joint = JointGraph(*joint_graph(step_of(FUSED["mean"])(LossModel()), token_ids()))
    (region, *_), _ = find_regions(joint)
    found = sections_of(RegionFacts(joint, region), True)
    assert isinstance(found, Sections)
    targets = [str(node.target) for node in found.per_token]
    sums = 2  # of exponentials, and of the gradient of the log-softmax
    assert targets == ["aten.amax.default", *["aten.sum.dim_IntList"] * sums]
    (gradient,) = found.gradients
    assert tuple(gradient.meta["val"].shape) == (VOCAB, 32)


@pytest.mark.kernels
@pytest.mark.full
def test_the_peak_of_a_head_of_few_tokens() -> None:
    """d=512, V=16,032, 1,024 tokens, bfloat16: at most 0.42 of the whole head's."""
    head = nn.Linear(512, 16_032, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(1024, 512, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(16_032, (1024,))

    def loss(hidden: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), labels)

    def peak(step: Callable[[Tensor], Tensor]) -> int:
        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(step(hidden), (hidden, head.weight))

        run()
        return peak_bytes(run, "cpu")

    whole = peak(torch.compile(loss))
    mixed = peak(compiled(loss, memory_budget=0.0))
    report = mstpass.reports()[-1]
    assert kinds(report) == [("lm_head", MIXED)]
    assert mixed <= 0.42 * whole, (mixed, whole)
    assert report.peak_bytes == pytest.approx(mixed, rel=0.08)


def test_random_numbers_are_cut_like_logits() -> None:
    """Both loops read the numbers of dropout that the forward drew: they are drawn once."""
    model, ids = LossModel(), token_ids()

    def loss(ids: Tensor) -> Tensor:
        logits = F.dropout(model.logits(ids).float(), 0.3)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def results(**options: object) -> list[Tensor]:
        torch.manual_seed(7)
        return gradients(model, compiled(loss, **options), [ids])

    whole = results(chunk="off")
    torch.compiler.reset()
    mixed = results(**OPTIONS)
    assert kinds(mstpass.reports()[-1]) == [("lm_head", MIXED)]
    torch.testing.assert_close(mixed, whole)


def test_a_backward_that_is_traced_again_keeps_the_fused_loop() -> None:
    joint, outputs = joint_graph(step_of(FUSED["mean"])(LossModel()), token_ids())
    options = Options(memory_budget=0.0, chunk_tokens=CHUNK)
    both, one = (
        pipeline.run(joint, options, num_fwd_outputs=outputs, loops_in_backward=loops)
        for loops in (True, False)
    )
    assert both.problem is not None
    kinds = [mode.kind for region in both.problem.regions for mode in region.modes]
    assert MIXED in kinds
    assert [plan.mode for plan in one.outcome.regions] == ["fused"]
