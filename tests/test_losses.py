"""Every usual loss is chunked in the expected mode, with right gradients; mixed tokens refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import mstpass
from mstpass.torch_internals.caches import counters
from tests.checks import check_against_float64, compiled, gradients, joint_graph, kinds, step_of
from tests.losses import FUSED, OUTSIDE, RECOMPUTED, REFUSED, VOCAB, LossModel, token_ids
from tests.models import TinyLM

pytestmark = [pytest.mark.sampled(7), pytest.mark.op_by_op]

CHUNK = 128
CHUNKED = {**FUSED, **RECOMPUTED}


# losses that differ little from others; they run with --all
ALIKE = (
    *("sum", "scaled", "bias", "num_items", "kl_to_reference", "masked_mse"),
    *("mean_over_tokens", "small_logits"),
)
MARKS = {**dict.fromkeys(ALIKE, pytest.mark.full), "preference": pytest.mark.kernels}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=MARKS[n]) if n in MARKS else n for n in CHUNKED],
)
def test_loss(name: str, device: str) -> None:
    model = LossModel().to(device)
    report = check_against_float64(
        model, step_of(CHUNKED[name]), [token_ids(device)], chunk_tokens=CHUNK
    )
    mode = "fused" if name in FUSED else "recompute"
    assert kinds(report) and set(kinds(report)) == {("lm_head", mode)}, str(report)


# Each compiles for seconds, and in bfloat16 they differ in little but their matmuls.
LOW = ("mean", "sliced", "policy_gradient", "small_logits")
LOW_TOO = ("distillation", "preference", "mse")


@pytest.mark.parametrize(
    "name", [*LOW, *(pytest.param(name, marks=pytest.mark.full) for name in LOW_TOO)]
)
def test_loss_in_bfloat16(name: str, device: str) -> None:
    model = LossModel().to(device, torch.bfloat16)
    report = check_against_float64(
        model, step_of(CHUNKED[name]), [token_ids(device)], chunk_tokens=CHUNK
    )
    assert kinds(report), str(report)


@pytest.mark.parametrize("name", OUTSIDE)
def test_loss_finished_outside(name: str, device: str) -> None:
    report = check_against_float64(
        LossModel().to(device),
        step_of(OUTSIDE[name]),
        [token_ids(device)],
        finish=lambda value: F.softplus(value * 0.01).mean(),
        chunk_tokens=CHUNK,
    )
    assert kinds(report) == [("lm_head", "recompute")], str(report)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused(name: str, device: str) -> None:
    model = LossModel().to(device)
    report = check_against_float64(
        model, step_of(REFUSED[name]), [token_ids(device)], chunk_tokens=CHUNK
    )
    assert not report.regions
    assert report.rejections and report.rejections[0].reason


@pytest.mark.parametrize("loss", [pytest.param("mean", marks=pytest.mark.full), "sliced"])
def test_the_last_token_counts(loss: str) -> None:
    model = LossModel()
    ids = torch.randint(0, VOCAB, (1, 2 * CHUNK + 2 if loss == "sliced" else 2 * CHUNK + 1))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % VOCAB

    # Labels of their own: all 2 * CHUNK + 1 tokens are in the loss, the last one in its own chunk.
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        if loss == "sliced":
            return F.cross_entropy(model.logits(ids)[0, :-1], labels[0, 1:])
        return F.cross_entropy(model.logits(ids)[0], labels[0])

    run = compiled(step, chunk_tokens=CHUNK)
    first, second = run(ids, ids).detach(), run(ids, other).detach()
    assert mstpass.reports()[-1].regions[0].num_tokens == 2 * CHUNK + 1
    torch.testing.assert_close(second - first, step(ids, other) - step(ids, ids))
    assert abs((second - first).item()) > 1e-5


def test_metrics_join_the_loop_and_returned_logits_are_stacked_once() -> None:
    model = TinyLM(VOCAB, 32)
    ids = torch.randint(0, VOCAB, (3, 101))

    def step(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model.logits(ids)
        accuracy = (logits.argmax(-1) == ids).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), accuracy, logits.detach()

    run = compiled(step, chunk_tokens=CHUNK)
    for found, expected in zip(run(ids), step(ids), strict=True):
        torch.testing.assert_close(found, expected)
    report = mstpass.reports()[-1]
    assert kinds(report) == [("lm_head", "fused")]
    assert "logits are an output of the graph" in str(report)


def test_returned_logits_with_a_gradient_of_their_own() -> None:
    def step(model: TinyLM, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

    def finish(values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1].square().mean()

    report = check_against_float64(
        TinyLM(VOCAB, 32),
        lambda model: lambda ids: step(model, ids),
        [torch.randint(0, VOCAB, (3, 101))],
        finish=finish,
        chunk_tokens=CHUNK,
    )
    assert kinds(report) == [("lm_head", "save")], str(report)
    assert len(report.regions[0].saved) == 1


@pytest.mark.kernels
def test_float16_gradients_wait_for_the_loss_scale() -> None:
    """A scale of 2**14 keeps gradients that would be zero in float16 without it."""
    hidden = torch.randn(400, 32).half().requires_grad_()
    weight = (torch.randn(VOCAB, 32) * 1e-3).half().requires_grad_()
    labels = torch.randint(0, VOCAB, (400,))

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels)

    def gradient(fn) -> Tensor:
        (found,) = torch.autograd.grad(fn(hidden, weight) * 2.0**14, hidden)
        return found

    found, expected = gradient(compiled(step, chunk_tokens=CHUNK)), gradient(step)
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "recompute")]
    assert expected.count_nonzero() > 0.9 * expected.numel()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-4)


def test_a_moved_slice_leaves_the_old_graph_alone() -> None:
    from mstpass.graph.graph_text import graph_text
    from mstpass.graph.joint import JointGraph
    from mstpass.normalize.move_token_slices import move_slices

    model = LossModel()
    graph, outputs = joint_graph(lambda ids: FUSED["sliced"](model, ids), token_ids("cpu"))
    before = graph_text(graph)
    new, (name,) = move_slices(JointGraph(graph, outputs))
    assert graph_text(graph) == before
    assert tuple(new.by_name[name].meta["val"].shape) == (400, VOCAB)


class _OtherBits(fx.Interpreter):
    """Products of other shapes differ in their last bits, as those of kernels may."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        return result * (1 + 1e-6 * len(result)) if target is torch.ops.aten.mm.default else result


def test_what_equals_a_maximum_is_found_in_fewer_rows() -> None:
    """Backward computes the wide values of an MLP again, and their maximum, for a slice's rows."""
    from mstpass.graph.joint import JointGraph
    from mstpass.normalize.move_token_slices import move_slices

    up, down, head = (
        torch.randn(*size, requires_grad=True) for size in ((16, 640), (640, 16), (16, 600))
    )

    def step(x: Tensor, up: Tensor, down: Tensor, head: Tensor) -> Tensor:
        wide = (x @ up).softmax(-1)
        x = x + (wide / wide.amax(-1, keepdim=True)) @ down
        return (x @ head)[:, 2:].square().mean()

    inputs = torch.randn(3, 7, 16), up, down, head
    joint = JointGraph(*joint_graph(step, *inputs))
    moved, names = move_slices(joint)
    assert names
    right, found = (
        _OtherBits(one.copy().module).run(*inputs, torch.tensor(1.0)) for one in (joint, moved)
    )
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_slice_stays_where_the_whole_logits_are_needed() -> None:
    from mstpass.graph.joint import JointGraph
    from mstpass.normalize.move_token_slices import move_slices

    model = LossModel()

    def step(ids: Tensor) -> Tensor:
        logits = model.logits(ids)
        whole = torch.logsumexp(logits, -1).square().mean()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + whole

    joint = JointGraph(*joint_graph(step, token_ids("cpu")))
    assert move_slices(joint) == (joint, frozenset())


@pytest.mark.parametrize(
    "name", ["sliced", pytest.param("policy_gradient", marks=pytest.mark.full)]
)
def test_sequences_of_any_length_share_one_graph(name: str) -> None:
    model = LossModel()
    loss = FUSED[name]
    counters.clear()
    options = {"strict": True, "chunk_tokens": 64}
    step = torch.compile(lambda ids: loss(model, ids), backend="mst", dynamic=True, options=options)
    for length in (101, 57, 33, 16, 9):
        ids = torch.randint(0, VOCAB, (4, length))
        expected = gradients(model, lambda ids: loss(model, ids), [ids])
        for ours, theirs in zip(gradients(model, step, [ids]), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")]


def test_contrastive_pairs_in_a_batch() -> None:
    """As many classes as tokens: their numbers are read in rows and whole."""
    encoder, x = nn.Linear(16, 16), torch.randn(512, 16)

    def loss(x: Tensor) -> Tensor:
        similar = F.normalize(encoder(x)) @ F.normalize(x).t()
        return F.cross_entropy(20 * similar, torch.arange(512))

    expected = torch.autograd.grad(loss(x), encoder.weight)
    found = torch.autograd.grad(
        torch.compile(loss, backend="mst", options={"strict": True, "chunk_tokens": 200})(x),
        encoder.weight,
    )
    assert [region.mode for region in mstpass.reports()[-1].regions] == ["fused"]
    torch.testing.assert_close(found, expected)
