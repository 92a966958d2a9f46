"""``logits="drop"`` finds logits by what a graph computes, and leaves all other outputs there.

The backend of these tests runs the graph of Dynamo as it is, so that nothing is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mstpass.options import Options
from mstpass.returned_logits import Drop, DroppedLogits, drop_logits

T, D, V = 64, 32, 512
Returned = tuple[Any, ...]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.head, self.second = nn.Linear(D, V, bias=False), nn.Linear(D, V)
        self.lora = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, V))
        self.small = nn.Linear(D, D)


model = Model()
hidden = torch.randn(T, D)
labels = torch.randint(V, (T,))


def _compiled(fn: Callable[..., Any], **kwargs: Any) -> tuple[Callable[..., Any], list[Drop]]:
    drops: list[Drop] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        drops.append(drop_logits(gm, Options(logits="drop")))
        return drops[-1].finish(gm)

    return torch.compile(fn, backend=backend, **kwargs), drops


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


# ---- dropped: all outputs but the loss and those that are named ----------------------------------
def _plain(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return _loss(logits, y), logits


def _casts_and_slices(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return logits.half(), _loss(logits, y), logits[:-1], logits[:, :100], logits.unsqueeze(0)


def _soft_cap_and_scale(h: Tensor, y: Tensor) -> Returned:
    logits = torch.tanh(model.head(h) / 30) * 30
    return logits, logits * y[:, None].float(), _loss(logits, y)


def _written_in_place(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    logits.div_(0.7)
    return _loss(logits, y), logits


def _masked(h: Tensor, y: Tensor) -> Returned:
    logits = torch.where(y[:, None] > 3, model.head(h), -1e4)
    return _loss(logits, y), logits.masked_fill(y[:, None] == 1, 0.0)


def _detached(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return _loss(logits, y), logits.detach()


def _twice(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return logits, _loss(logits, y), {"logits": logits, "again": [logits]}


def _several_heads(h: Tensor, y: Tensor) -> Returned:
    one, two = model.head(h), model.second(h)
    return _loss(one, y) + _loss(two, y), one, two, torch.stack([one, two])


def _low_rank_update(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h) + 0.5 * model.lora(h)
    return _loss(logits, y), logits


def _weight_from_the_graph(h: Tensor, y: Tensor) -> Returned:
    logits = torch.matmul(h, (model.head.weight * 0.5).t())
    return _loss(logits, y), logits


def _head_in_a_checkpoint(h: Tensor, y: Tensor) -> Returned:
    logits = checkpoint(model.head, h, use_reentrant=False)
    return checkpoint(_loss, logits, y, use_reentrant=False), logits


def _under_autocast(h: Tensor, y: Tensor) -> Returned:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(h)
    return _loss(logits, y), logits


DROPPED = {
    f.__name__.strip("_"): f
    for f in (
        *(_plain, _casts_and_slices, _soft_cap_and_scale, _written_in_place, _masked, _detached),
        *(_twice, _several_heads, _low_rank_update, _weight_from_the_graph),
        *(_head_in_a_checkpoint, _under_autocast),
    )
}


def _leaves(returned: Any) -> list[Any]:
    if isinstance(returned, dict):
        returned = list(returned.values())
    if isinstance(returned, tuple | list):
        return [leaf for item in returned for leaf in _leaves(item)]
    return [returned]


@pytest.mark.parametrize("name", DROPPED)
def test_logits_beside_their_loss(name: str) -> None:
    step, drops = _compiled(DROPPED[name], fullgraph=True)
    found, expected = _leaves(step(hidden, labels)), _leaves(DROPPED[name](hidden, labels))
    assert len(found) == len(expected) and not drops[0].rejections
    for got, right in zip(found, expected, strict=True):
        assert (got.shape, got.dtype, got.device) == (right.shape, right.dtype, right.device)
        if right.dim() == 0:
            torch.testing.assert_close(got, right)
        else:
            assert isinstance(got, DroppedLogits) and not got.requires_grad


# ---- kept ----------------------------------------------------------------------------------------
def _no_loss(h: Tensor, y: Tensor) -> Returned:
    return model.head(h), h.sum()


def _of_no_head(h: Tensor, y: Tensor) -> Returned:
    """An MLP's wide activations, hidden states, narrow products, and what is no float."""
    wide = model.up(h).relu()
    h = h + model.down(wide)
    logits = model.head(h)
    log_p = logits.log_softmax(-1)
    of_tokens = logits.argmax(-1), logits.max(-1).values, -(log_p.exp() * log_p).sum(-1)
    return _loss(logits, y), wide, h, model.small(h), of_tokens, logits[:, [1, 2, 3]]


def _of_another_head(h: Tensor, y: Tensor) -> Returned:
    return _loss(model.head(h), y), model.second(h)


def _keys_and_values(h: Tensor, y: Tensor) -> Returned:
    q, k, v = (model.up(x).view(1, T, 4, D).transpose(1, 2) for x in (h, h.sin(), h.cos()))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(T, 4 * D)
    return _loss(model.head(model.down(attended)), y), k, v


def _loss_of_each_sequence(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return F.cross_entropy(logits, y, reduction="none").view(4, -1).mean(1), logits


def _loss_without_gradient(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return _loss(logits.detach(), y), logits


KEPT = {
    f.__name__.strip("_"): f
    for f in (
        *(_no_loss, _of_no_head, _of_another_head, _keys_and_values),
        *(_loss_of_each_sequence, _loss_without_gradient),
    )
}


@pytest.mark.parametrize("name", KEPT)
def test_other_outputs_stay(name: str) -> None:
    step, drops = _compiled(KEPT[name], fullgraph=True)
    for got, right in zip(step(hidden, labels), KEPT[name](hidden, labels), strict=True):
        torch.testing.assert_close(got, right)
    assert not any(drop.outputs or drop.rejections for drop in drops)


@pytest.mark.parametrize("name", ["plain", "several_heads"])
def test_without_gradients_logits_stay(name: str) -> None:
    step, _ = _compiled(DROPPED[name], fullgraph=True)
    with torch.no_grad():
        for got, right in zip(step(hidden, labels), DROPPED[name](hidden, labels), strict=True):
            torch.testing.assert_close(got, right)
    assert isinstance(step(hidden, labels)[-1], DroppedLogits)


def test_they_are_kept_unless_asked() -> None:
    gm = fx.symbolic_trace(lambda x: (x.sum(), x))
    assert drop_logits(gm, Options()) == Drop()


# ---- refused, with a reason ----------------------------------------------------------------------
def _probabilities(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return _loss(logits, y), logits.log_softmax(-1)


def _sorted_words(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    return _loss(logits, y), logits.sort(-1).values


def _graph_break(h: Tensor, y: Tensor) -> Returned:
    logits = model.head(h)
    loss = _loss(logits, y)
    torch._dynamo.graph_break()
    return loss, logits


def _loss_in_the_checkpoint_of_the_head(h: Tensor, y: Tensor) -> Returned:
    def part(h: Tensor) -> Returned:
        logits = model.head(h)
        return _loss(logits, y), logits, 2 * h

    return checkpoint(part, h, use_reentrant=False)


REFUSED = {
    _probabilities: "made from logits by aten._log_softmax.default",
    _sorted_words: "made from logits by aten.sort",
    _graph_break: "graph break",
    _loss_in_the_checkpoint_of_the_head: "made from logits by aten._log_softmax.default",
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, behind a graph break
@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__.strip("_"))
def test_refusals_have_a_reason(fn: Callable[..., Any]) -> None:
    step, drops = _compiled(fn)
    for got, right in zip(step(hidden, labels), fn(hidden, labels), strict=True):
        torch.testing.assert_close(got, right)
    (rejection,) = drops[0].rejections
    assert REFUSED[fn] in rejection.reason and rejection.fix and rejection.stage == "logits"
    assert rejection.bytes > 0 and not drops[0].outputs


# ---- sizes ---------------------------------------------------------------------------------------
def test_symbolic_sizes() -> None:
    def fn(h: Tensor, y: Tensor) -> Returned:
        logits = model.head(h)
        return logits[:, :-1], _loss(logits, y), logits.flatten(0, 1)

    step, drops = _compiled(fn, dynamic=True, fullgraph=True)
    for batch, length in ((2, 12), (3, 17)):
        h, y = torch.randn(batch, length, D), torch.randint(V, (batch, length))
        some, loss, flat = step(h, y)
        torch.testing.assert_close(loss, fn(h, y)[1])
        assert (some.shape, flat.shape) == ((batch, length - 1, V), (batch * length, V))
    assert len(drops) == 1


def test_sizes_that_depend_on_data() -> None:
    def fn(h: Tensor, y: Tensor) -> Returned:
        logits = model.head(h[y > V // 2])
        return logits.square().sum(), logits

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step, drops = _compiled(fn, fullgraph=True)
        torch.testing.assert_close(step(hidden, labels)[1], fn(hidden, labels)[1])
    (rejection,) = drops[0].rejections
    assert "depends on data" in rejection.reason


# ---- DDP -----------------------------------------------------------------------------------------
class InBuckets(nn.Module):
    """Its parameters fill several buckets of DDP; in the last one may be a reader of the logits."""

    def __init__(self, reads_logits: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 8192), nn.Linear(8192, D)
        self.head = nn.Linear(D, 8192)
        self.reader = nn.Linear(8192, 64) if reads_logits else None

    def forward(self, h: Tensor, y: Tensor) -> Returned:
        logits = self.head(h + self.down(self.up(h).relu()))
        loss = _loss(logits, y)
        if self.reader is None:
            return loss, logits
        return loss, logits, self.reader(logits).mean()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    if not dist.is_available():
        pytest.skip("torch without distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("reads_logits", [False, True])
def test_buckets_of_ddp(one_process: None, reads_logits: bool) -> None:
    """The bucket of head and loss drops the logits, unless a later bucket reads them."""
    ddp = DistributedDataParallel(InBuckets(reads_logits), bucket_cap_mb=1)
    step, drops = _compiled(ddp)
    returned = step(hidden, labels)
    assert len(drops) > 1  # DDP has split the graph
    expected = ddp(hidden, labels)
    torch.testing.assert_close(returned[0], expected[0])
    assert isinstance(returned[1], DroppedLogits) == (not reads_logits)
    reasons = [r.reason for drop in drops for r in drop.rejections]
    assert reads_logits == any("DDP" in reason for reason in reasons)
