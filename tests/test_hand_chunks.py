"""Losses that are chunked by hand: one product and one loop in the place of one for each chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass import detect_stage
from mstpass.graph.joint import JointGraph
from mstpass.loops.candidate_modes import all_candidates
from mstpass.normalize import normalized
from tests.checks import check_against_float64, joint_graph, kinds
from tests.graphs_of_steps import check_same_results

pytestmark = [pytest.mark.sampled(4), pytest.mark.op_by_op]
VOCAB, DIM, TOKENS = 600, 16, 192
CHUNKS = {"chunk_tokens": 64, "strict": True}


class Head(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.hidden = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=bias)


Loss = Callable[[Head, Tensor, Tensor], Tensor]


def _chunk_loss(model: Head, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).float(), ids, reduction="sum")


def _whole(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    return _chunk_loss(model, hidden, ids) / len(ids)


def _sums(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    total = torch.zeros((), device=hidden.device)
    for x, t in zip(hidden.chunk(4), ids.chunk(4), strict=True):
        total = total + _chunk_loss(model, x, t)
    return total / len(ids)


def _slices(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    """The last chunk is shorter."""
    starts = range(0, len(ids), 56)
    return sum(_chunk_loss(model, hidden[i : i + 56], ids[i : i + 56]) for i in starts) / len(ids)  # type: ignore[return-value]


def _losses(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    pieces = zip(hidden.split(50), ids.split(50), strict=True)
    each = [F.cross_entropy(model.head(x).float(), t, reduction="none") for x, t in pieces]
    return torch.cat(each).mean()


def _means(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    pieces = zip(hidden.chunk(3), ids.chunk(3), strict=True)
    return torch.stack([F.cross_entropy(model.head(x).float(), t) for x, t in pieces]).mean()


def _checkpoints(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    total = torch.zeros((), device=hidden.device)
    for x, t in zip(hidden.chunk(3), ids.chunk(3), strict=True):
        total = total + checkpoint(_chunk_loss, model, x, t, use_reentrant=False)
    return total / len(ids)


def _sequences(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    """One sequence of a batch after the other."""
    batch, labels = hidden.view(3, -1, DIM), ids.view(3, -1)
    return sum(_chunk_loss(model, x, t) for x, t in zip(batch, labels, strict=True)) / len(ids)  # type: ignore[return-value]


def _along_the_sequence(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    batch, labels = hidden.view(2, -1, DIM), ids.view(2, -1)
    total = torch.zeros((), device=hidden.device)
    for x, t in zip(batch.chunk(3, 1), labels.chunk(3, 1), strict=True):
        total = total + _chunk_loss(model, x.flatten(0, 1), t.flatten())
    return total / len(ids)


JOINED = (_sums, _slices, _losses, _means, _checkpoints, _sequences, _along_the_sequence)


def _step(model: Head, loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, ids: loss(model, model.hidden(x), ids)


def _batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, DIM), torch.randint(VOCAB, (tokens,))


@pytest.mark.parametrize("loss", JOINED)
def test_the_graph_computes_the_same(loss: Loss) -> None:
    assert check_same_results(_step(Head(), loss), *_batch())


@pytest.mark.parametrize("loss", JOINED)
def test_the_chunks_are_one_region(loss: Loss) -> None:
    report = mstpass.explain(_step(Head(), loss), *_batch(768), options=CHUNKS)
    assert kinds(report) == [("lm_head", "fused")], str(report)
    assert report.regions[0].num_tokens == 768
    whole = mstpass.explain(_step(Head(), _whole), *_batch(768), options=CHUNKS)
    labels_bytes = 4 * 768 * 8  # labels and numbers of the tokens, put side by side
    assert report.peak_bytes <= whole.peak_bytes + labels_bytes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [_sums, _losses, _checkpoints])
def test_gradients(loss: Loss, dtype: torch.dtype, bias: bool, device: str) -> None:
    x, ids = _batch(186)
    report = check_against_float64(
        Head(bias).to(device, dtype),
        lambda model: _step(model, loss),
        [x.to(device, dtype), ids.to(device)],
        chunk_tokens=64,
    )
    assert kinds(report) == [("lm_head", "fused")], str(report)


@pytest.mark.kernels
@pytest.mark.full
def test_gradients_under_inductor() -> None:
    check_against_float64(Head(), lambda model: _step(model, _sums), _batch(), chunk_tokens=64)


def test_gradients_under_autocast() -> None:
    check_against_float64(
        Head(), lambda model: _step(model, _slices), _batch(), autocast="cpu", chunk_tokens=64
    )


# ---- what stays ----------------------------------------------------------------------------------
def _two_weights(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    a, b = hidden.chunk(2)
    first = F.cross_entropy(model.head(a), ids[: len(a)])
    return first + F.cross_entropy(F.linear(b, model.head.weight * 2), ids[len(a) :])


def _two_losses(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    a, b = hidden.chunk(2)
    return _chunk_loss(model, a, ids[: len(a)]) + model.head(b).logsumexp(-1).square().sum()


def _half(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    """Half of the tokens have no loss."""
    pieces = list(zip(hidden.chunk(4), ids.chunk(4), strict=True))
    return _chunk_loss(model, *pieces[0]) + _chunk_loss(model, *pieces[2])


def _one_after_the_other(model: Head, hidden: Tensor, ids: Tensor) -> Tensor:
    """The second chunk's loss needs the first one's."""
    a, b = hidden.chunk(2)
    first = _chunk_loss(model, a, ids[: len(a)])
    return _chunk_loss(model, b * first.sigmoid(), ids[len(a) :]) + first


@pytest.mark.parametrize("loss", [_two_weights, _two_losses, _half, _one_after_the_other])
def test_other_chunks_stay(loss: Loss) -> None:
    joint = JointGraph(*joint_graph(_step(Head(), loss), *_batch()))
    plain = normalized(joint, kept=joint.by_name)[1]
    prepared = normalized(joint)[1]
    count = [
        sum(node.target is torch.ops.aten.mm.default for node in g.nodes) for g in (plain, prepared)
    ]
    assert count[0] == count[1]


def test_chunks_whose_product_ends_in_no_region_stay() -> None:
    def without_whole(*args: Any) -> tuple[list[Any], list[Any]]:
        found, rejections = all_candidates(*args)
        return [c for c in found if c.plans[0][1].num_tokens != 768], rejections

    options = {"chunk_tokens": 64, "strict": True}
    with mock.patch.object(detect_stage, "all_candidates", without_whole):
        report = mstpass.explain(_step(Head(), _sums), *_batch(768), options=options)
    assert [region.num_tokens for region in report.regions] == [192] * 4, str(report)
