"""Windows of wide values: losses of chunks of finished logits, and of a slice beside the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.graph.joint import JointGraph
from mstpass.normalize.join_windows import join_windows
from tests.checks import check_against_float64, joint_graph, kinds
from tests.graphs_of_steps import check_same_results

pytestmark = [pytest.mark.sampled(6), pytest.mark.op_by_op]
VOCAB, DIM = 600, 16
Loss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="sum")


def _total(pieces: object) -> Tensor:
    return torch.stack(list(pieces)).sum()  # type: ignore[call-overload]


def _whole(logits: Tensor, ids: Tensor) -> Tensor:
    return _cross_entropy(logits, ids)


def _chunks(logits: Tensor, ids: Tensor) -> Tensor:
    return _total(
        _cross_entropy(x.float(), t) for x, t in zip(logits.chunk(4), ids.chunk(4), strict=True)
    )


def _chunks_along_the_sequence(logits: Tensor, ids: Tensor) -> Tensor:
    pieces = zip(logits.chunk(4, 1), ids.chunk(4, 1), strict=True)
    return _total(_cross_entropy(x, t) for x, t in pieces)


def _means(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of each chunk is divided by the number of its own labels."""
    return _total(
        F.cross_entropy(
            x.flatten(0, 1), t.flatten(), label_smoothing=0.1, ignore_index=int(VOCAB / 2)
        )
        for x, t in zip(logits.split([3, 1]), ids.split([3, 1]), strict=True)
    )


def _sequences(logits: Tensor, ids: Tensor) -> Tensor:
    return _total(F.cross_entropy(x, t) for x, t in zip(logits, ids, strict=True))


def _positions(logits: Tensor, ids: Tensor) -> Tensor:
    x, t = logits.unbind(1), ids.unbind(1)
    return _total(F.cross_entropy(x[i], t[i]) for i in range(len(x)))


def _slices(logits: Tensor, ids: Tensor) -> Tensor:
    x, t = logits.flatten(0, 1), ids.flatten()
    return _total(F.cross_entropy(x[i : i + 64], t[i : i + 64]) for i in range(0, len(t), 64))


def _shifted_chunks(logits: Tensor, ids: Tensor) -> Tensor:
    return _chunks(logits[:, :-1], ids[:, 1:])


ONE_LOSS = (
    _chunks,
    _chunks_along_the_sequence,
    _means,
    _sequences,
    _slices,
    _shifted_chunks,
)


def _z_loss_of_all(logits: Tensor, ids: Tensor) -> Tensor:
    loss = _cross_entropy(logits[:, :-1], ids[:, 1:])
    return loss + 1e-3 * logits.logsumexp(-1).square().mean()


def _two_windows(logits: Tensor, ids: Tensor) -> Tensor:
    near = _cross_entropy(logits[:, :-1], ids[:, 1:])
    return near + _cross_entropy(logits[:, :-2], ids[:, 2:])


def _two_losses(logits: Tensor, ids: Tensor) -> Tensor:
    prompt, answer = logits.split([48, 48], 1)
    return prompt.logsumexp(-1).square().mean() + _cross_entropy(answer, ids[:, 48:])


ALL_TOKENS = (_z_loss_of_all, _two_windows, _two_losses)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, VOCAB, bias=False)


def _step(model: Head, loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda hidden, ids: loss(model.linear(hidden), ids)


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 96, DIM), torch.randint(VOCAB, (4, 96))


@pytest.mark.parametrize("loss", [*ONE_LOSS, *ALL_TOKENS])
def test_the_graph_computes_the_same(loss: Loss) -> None:
    assert check_same_results(_step(Head(), loss), *_batch())


@pytest.mark.parametrize("loss", [*ONE_LOSS, *ALL_TOKENS])
def test_the_head_is_one_region(loss: Loss) -> None:
    options = {"chunk_tokens": 64, "strict": True}
    report = mstpass.explain(_step(Head(), loss), *_batch(), options=options)
    assert kinds(report) == [("lm_head", "fused")], str(report)
    whole = mstpass.explain(_step(Head(), _whole), *_batch(), options=options)
    labels_bytes = 16 * 4 * 96 * 8  # labels and numbers of the tokens, each window's own
    assert report.peak_bytes <= whole.peak_bytes + labels_bytes


def test_tokens_outside_of_the_window_have_no_gradient() -> None:
    """Also where their values are not finite."""
    model = Head()

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return _cross_entropy(logits[:, :-1], ids[:, 1:]) + logits.flatten(0, 1)[0].sum()

    hidden, ids = _batch()
    hidden[:, -1] = torch.inf
    step = torch.compile(_step(model, loss), backend="mst", options={"chunk_tokens": 64})
    step(hidden.nan_to_num(posinf=1e30), ids).backward()
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.isfinite().all()


def _over_the_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].softmax(1).square().sum() + logits.logsumexp(-1).sum()


def _few_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :8].logsumexp(-1).square().sum() + logits.logsumexp(-1).sum()


def _one_after_the_other(logits: Tensor, ids: Tensor) -> Tensor:
    """The second loss needs the first one's result."""
    first, second = logits.chunk(2)
    scale = first.logsumexp(-1)
    return (second * scale.unsqueeze(-1)).square().sum()


def _sums_of_all_words(logits: Tensor, ids: Tensor) -> Tensor:
    first, second = logits.chunk(2)
    return first.square().sum() / 3 + second.square().sum() / 5


@pytest.mark.parametrize(
    "loss", [_over_the_tokens, _few_tokens, _one_after_the_other, _sums_of_all_words]
)
def test_other_windows_stay(loss: Loss) -> None:
    joint = JointGraph(*joint_graph(_step(Head(), loss), *_batch()))
    same, names = join_windows(joint)
    assert same is joint and not names


@pytest.mark.parametrize("loss", [_chunks, _means, _z_loss_of_all])
def test_gradients(loss: Loss, device: str) -> None:
    check_against_float64(
        Head().to(device),
        lambda model: _step(model, loss),
        [each.to(device) for each in _batch()],
        chunk_tokens=64,
    )
