"""Products that are computed in parts: windows that meet, heads that a view merges with tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.graph.joint import JointGraph
from mstpass.normalize.unstack import unstack
from tests.checks import (
    check_against_float64,
    compiled,
    errors,
    gradients,
    in_float64,
    joint_graph,
    kinds,
    rms,
    step_of,
)
from tests.graphs_of_steps import check_same_results

pytestmark = [pytest.mark.sampled(4), pytest.mark.op_by_op]
VOCAB, DIM, TOKENS, HEADS = 600, 16, 96, 3
CHUNKS = {"chunk_tokens": 64, "strict": True}
Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.float().log_softmax(-1), b.float().log_softmax(-1)
    there = F.kl_div(p, q, reduction="sum", log_target=True)
    return (there + F.kl_div(q, p, reduction="sum", log_target=True)) / len(a)


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), ids)


# ---- windows that meet: each gets the logits of two or three copies of every token ---------------
def _halves(logits: Tensor, ids: Tensor) -> Tensor:
    """R-Drop: the tokens twice, one copy after the other."""
    return _loss(logits, ids) + _divergence(*logits.chunk(2))


def _stacked(logits: Tensor, ids: Tensor) -> Tensor:
    a, b = logits.view(2, -1, VOCAB).unbind()
    return _loss(logits, ids) + _divergence(a, b)


def _interleaved(logits: Tensor, ids: Tensor) -> Tensor:
    return _loss(logits, ids) + _divergence(logits[0::2], logits[1::2])


def _pairs(logits: Tensor, ids: Tensor) -> Tensor:
    pairs = logits.view(-1, 2, VOCAB)
    return _loss(logits, ids) + _divergence(pairs[:, 0], pairs[:, 1])


def _three(logits: Tensor, ids: Tensor) -> Tensor:
    a, b, c = logits.chunk(3)
    return _loss(logits, ids) + _divergence(a, b) + _divergence(b, c)


def _of_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    a, b = log_p.chunk(2)
    return F.nll_loss(log_p, ids) + F.mse_loss(a.exp(), b.exp())


MEETING = (_halves, _stacked, _interleaved, _pairs, _three, _of_log_softmax)


def _step(model: Head, loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, ids: loss(model.head(model.hidden(x)), ids)


def _batch(tokens: int = 2 * TOKENS) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, DIM), torch.randint(VOCAB, (tokens,))


@pytest.mark.parametrize("loss", MEETING)
def test_windows_that_meet_compute_the_same(loss: Loss) -> None:
    assert check_same_results(_step(Head(), loss), *_batch())


@pytest.mark.parametrize("loss", MEETING)
def test_windows_that_meet_make_one_region(loss: Loss) -> None:
    report = mstpass.explain(_step(Head(), loss), *_batch(768), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")], str(report)
    assert report.regions[0].num_tokens == (256 if loss is _three else 384)
    assert not report.rejections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [_halves, _interleaved, _three])
def test_gradients_of_windows_that_meet(loss: Loss, dtype: torch.dtype, device: str) -> None:
    x, ids = _batch(2 * 93 if loss is not _three else 3 * 93)  # the last chunk is shorter
    report = check_against_float64(
        Head().to(device, dtype),
        lambda model: _step(model, loss),
        [x.to(device, dtype), ids.to(device)],
        chunk_tokens=32,
    )
    assert kinds(report) == [("lm_head", "fused")], str(report)


@pytest.mark.kernels
def test_gradients_under_inductor() -> None:
    check_against_float64(Head(), lambda model: _step(model, _halves), _batch(), chunk_tokens=64)


def test_the_loop_returns_one_gradient_of_the_weight() -> None:
    """Each window has a product for it, and the loop adds them up."""
    report = mstpass.explain(_step(Head(), _three), *_batch(768), options=CHUNKS)
    whole = mstpass.explain(_step(Head(), _loss), *_batch(768), options=CHUNKS)
    weight_bytes = VOCAB * DIM * 4
    chunk_bytes = 6 * 64 * VOCAB * 4  # logits and gradients of three windows
    assert report.peak_bytes <= whole.peak_bytes + chunk_bytes + weight_bytes / 2


def test_a_symbolic_number_of_tokens() -> None:
    model = Head()

    def loss(x: Tensor, ids: Tensor) -> Tensor:
        hidden = model.hidden(torch.stack([x, 2 * x]))
        logits = model.head(hidden)
        return _loss(logits[0], ids) + _divergence(logits[0], logits[1])

    step = torch.compile(loss, backend="mst", options=CHUNKS)
    for tokens in (TOKENS, 130):
        x, ids = _batch(tokens)
        for each in (x, ids):
            torch._dynamo.mark_dynamic(each, 0)
        torch.testing.assert_close(step(x, ids), loss(x, ids))
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")]


def _overlapping(logits: Tensor, ids: Tensor) -> Tensor:
    return _loss(logits, ids) + _divergence(logits[:128], logits[64:])


def _shifted(logits: Tensor, ids: Tensor) -> Tensor:
    return _loss(logits, ids) + _divergence(logits[:-1], logits[1:])


def _unequal(logits: Tensor, ids: Tensor) -> Tensor:
    a, b = logits.split([64, 128])
    return _loss(logits, ids) + _divergence(a, b[:64])


def _by_themselves(logits: Tensor, ids: Tensor) -> Tensor:
    a, b = logits.chunk(2)
    return _loss(a, ids[: len(a)]) + 2 * _loss(b, ids[len(a) :])


@pytest.mark.parametrize("loss", [_overlapping, _shifted, _unequal, _by_themselves])
def test_other_windows_stay(loss: Loss) -> None:
    joint = JointGraph(*joint_graph(_step(Head(), loss), *_batch()))
    same, names = unstack(joint)
    assert same is joint and not names


@pytest.mark.parametrize("loss", [_overlapping, _shifted, _unequal])
def test_other_windows_are_refused_by_name(loss: Loss) -> None:
    report = mstpass.explain(_step(Head(), loss), *_batch(), options={"chunk_tokens": 64})
    (rejection,) = report.rejections
    assert "works along a token dim" in rejection.reason and rejection.node


# ---- self-distillation: every crop of the student meets each of the teacher ----------------------
class Crops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(DIM, VOCAB, bias=False)
        self.teacher = nn.Linear(DIM, VOCAB, bias=False).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_p = (self.student(x) / 0.1).log_softmax(-1).chunk(4)
        q = (self.teacher(y) / 0.04).softmax(-1).chunk(2)
        pairs = [(i, j) for i in range(2) for j in range(4) if i != j]
        return torch.stack([-(q[i] * log_p[j]).sum(-1).mean() for i, j in pairs]).mean()


def test_crops_are_one_region() -> None:
    x, y = torch.randn(4 * 256, DIM), torch.randn(2 * 256, DIM)
    report = mstpass.explain(Crops(), x, y, options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")], str(report)
    assert report.regions[0].num_tokens == 256


def test_gradients_of_crops() -> None:
    x, y = torch.randn(4 * 80, DIM), torch.randn(2 * 80, DIM)
    check_against_float64(Crops(), lambda model: model, [x, y], chunk_tokens=32)


# ---- heads that a view merges with the tokens ----------------------------------------------------
class Stacked(nn.Module):
    """Heads in one weight ``[H, d, V]``."""

    def __init__(self, layout: str = "nd,hdv->hnv"):
        super().__init__()
        self.hidden = nn.Linear(DIM, DIM)
        self.weight = nn.Parameter(torch.randn(HEADS, DIM, VOCAB) / 4)
        self.layout = layout

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = torch.einsum(self.layout, self.hidden(x), self.weight)
        return F.cross_entropy(logits.reshape(-1, VOCAB).float(), ids.flatten())


class Batched(Stacked):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden = self.hidden(x).expand(HEADS, *x.shape)
        logits = torch.bmm(hidden, self.weight)
        return F.cross_entropy(logits.view(-1, VOCAB).float(), ids.flatten())


class Folded(Stacked):
    """One product of all heads' words with the tokens, ``[H V, N]``: so torch multiplies them."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.hidden(x) @ self.weight
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class Linear(nn.Module):
    """Heads side by side in one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(DIM, HEADS * VOCAB)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.heads(x).view(-1, VOCAB)
        return F.cross_entropy(logits.float(), ids.flatten())


MODELS = {
    "einsum": Stacked,
    "tokens_first": lambda: Stacked("nd,hdv->nhv"),
    "batched": Batched,
    "folded": Folded,
    "linear": Linear,
}


def _heads_batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, DIM), torch.randint(VOCAB, (HEADS, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_heads_compute_the_same(name: str) -> None:
    assert check_same_results(MODELS[name](), *_heads_batch())


@pytest.mark.parametrize("name", MODELS)
def test_each_head_is_a_region(name: str) -> None:
    report = mstpass.explain(MODELS[name](), *_heads_batch(512), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")] * HEADS, str(report)
    assert {region.num_tokens for region in report.regions} == {512}
    assert not report.rejections


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_heads(name: str, device: str) -> None:
    x, ids = _heads_batch(93)  # the last chunk is shorter
    report = check_against_float64(
        MODELS[name]().to(device),
        lambda model: model,
        [x.to(device), ids.to(device)],
        chunk_tokens=32,
    )
    assert kinds(report) == [("lm_head", "fused")] * HEADS, str(report)


def _list_of_heads(model: Stacked) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, ids: Tensor) -> Tensor:
        hidden = model.hidden(x)
        logits = [(hidden @ weight).float() for weight in model.weight]
        return torch.stack([F.cross_entropy(z, t) for z, t in zip(logits, ids, strict=True)]).mean()

    return step


@pytest.mark.parametrize("name", ["einsum", "tokens_first", "folded"])
def test_heads_in_bfloat16_are_as_accurate_as_a_list_of_heads(name: str) -> None:
    """Each head's gradient of the tokens is rounded, and their sum once more."""
    model, (x, labels) = MODELS[name](), _heads_batch(93)
    ids = labels.t().contiguous() if name == "tokens_first" else labels
    wide, (wide_x, _) = in_float64(model, (x, ids))
    exact = gradients(wide, _list_of_heads(wide), (wide_x, labels))
    model.to(torch.bfloat16)
    separate = gradients(model, _list_of_heads(model), (x.bfloat16(), labels))
    ours = gradients(model, compiled(model.__call__, chunk_tokens=32), (x.bfloat16(), ids))
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")] * HEADS
    assert rms(errors(ours, exact)) <= 1.1 * rms(errors(separate, exact)) + 1e-5


@pytest.mark.kernels
@pytest.mark.full
def test_gradients_of_heads_under_inductor() -> None:
    check_against_float64(Stacked(), lambda model: model, _heads_batch(), chunk_tokens=64)


def test_heads_of_which_the_whole_is_returned_stay() -> None:
    model = Stacked()

    def step(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.einsum("nd,hdv->hnv", model.hidden(x), model.weight)
        return F.cross_entropy(logits.reshape(-1, VOCAB), ids.flatten()), logits.detach()

    assert not check_same_results(step, *_heads_batch())


def test_queries_keys_and_values_stay_one_product() -> None:
    """Their heads are merged with the batch, but a third of the product is none that widens."""
    project = nn.Linear(DIM, 3 * DIM)

    def step(x: Tensor, ids: Tensor) -> Tensor:
        qkv = project(x).view(8, -1, 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
        q, k, v = (each.reshape(16, -1, DIM // 2) for each in qkv.unbind())
        return (torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)).square().sum()

    joint = JointGraph(*joint_graph(step, *_batch(8 * 64)))
    assert unstack(joint)[0] is joint


def _tokens_first(model: Stacked, x: Tensor, ids: Tensor) -> Tensor:
    log_p = torch.einsum("nd,hdv->nhv", model.hidden(x), model.weight).log_softmax(-1)
    return -log_p.gather(-1, ids.t().unsqueeze(-1)).mean()


def _folded(model: Stacked, x: Tensor, ids: Tensor) -> Tensor:
    log_p = (model.hidden(x) @ model.weight).log_softmax(-1)
    return -log_p.gather(-1, ids.unsqueeze(-1)).mean()


@pytest.mark.parametrize("loss", [_tokens_first, _folded])
def test_heads_that_no_view_merges_stay(loss: Callable[..., Tensor]) -> None:
    """A loop over tokens holds all heads of a token."""
    step = step_of(loss)(Stacked())
    joint = JointGraph(*joint_graph(step, *_heads_batch()))
    assert unstack(joint)[0] is joint
    report = mstpass.explain(step, *_heads_batch(512), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")], str(report)
