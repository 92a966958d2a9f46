"""Losses over chosen tokens: by a mask, by indices; chosen before the head and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass import measure
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.sizes import generic_shape
from mstpass.normalize import normalized
from tests.checks import STRICT, check_against_float64, joint_graph, kinds

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.op_by_op,
    pytest.mark.filterwarnings("ignore:var_mean:UserWarning"),  # torch's, of no rows
]
VOCAB, WIDTH, SHAPE = 600, 32, (4, 40)
CHUNKS: dict[str, Any] = {"chunk_tokens": 16}
Select = Callable[["MaskedLM", Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _capture() -> Iterator[None]:
    """Dynamo captures ops whose result has as many rows as the data says."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


class MaskedLM(nn.Module):
    """Embeddings, and a head with a transform before it, as masked language models have."""

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.embed(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(F.gelu(self.dense(hidden))))


def _before(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(model.hidden(ids)[chosen]).float(), labels[chosen])


def _after(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(model.hidden(ids))[chosen].float(), labels[chosen])


def _capped(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    logits = 5 * torch.tanh(model.logits(model.hidden(ids)).float() / 5)
    return F.cross_entropy(logits[chosen], labels[chosen], reduction="sum")


def _flat(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    """Inductor alone fails here: it makes two sizes of one mask, and merges their masks."""
    logits = model.logits(model.hidden(ids)).view(-1, VOCAB)
    return F.cross_entropy(logits[chosen.view(-1)].float(), labels.view(-1)[chosen.view(-1)])


def _of_indices(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    rows = chosen.view(-1).nonzero().squeeze(1)
    logits = model.logits(model.hidden(ids)).view(-1, VOCAB)
    return F.cross_entropy(logits[rows].float(), labels.view(-1)[rows])


def _of_pairs(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    where = chosen.nonzero(as_tuple=True)
    return F.cross_entropy(model.logits(model.hidden(ids))[where].float(), labels[where])


MASKED: dict[str, Select] = {
    "before": _before,
    "after": _after,
    "capped": _capped,
    **({} if torch.__version__ < "2.13" else {"flat": _flat}),  # Dynamo guards on its sizes
    "indices": _of_indices,
    "pairs": _of_pairs,
}


def _batch(shape: tuple[int, int] = SHAPE, share: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids, labels = torch.randint(VOCAB, (2, *shape))
    return ids, torch.rand(shape) < share, labels


def _step(select: Select) -> Callable[[Any], Callable[..., Tensor]]:
    return lambda model: lambda *batch: select(model, *batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("select", MASKED.values(), ids=MASKED)
def test_loops_over_the_rows_of_a_mask(select: Select, dtype: torch.dtype) -> None:
    model = MaskedLM().to(dtype)
    report = check_against_float64(model, _step(select), _batch(), **CHUNKS)
    assert [kind for kind, _ in kinds(report)] == ["lm_head"], str(report)
    assert report.regions[0].num_tokens == 160  # as many as there may be


@pytest.mark.kernels
@pytest.mark.parametrize("name", [pytest.param("before", marks=pytest.mark.full), "after"])
def test_the_same_under_inductor(name: str) -> None:
    report = check_against_float64(MaskedLM(), _step(MASKED[name]), _batch(), **CHUNKS)
    assert kinds(report)


def _values(model: nn.Module, step: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> list[Any]:
    model.zero_grad(set_to_none=True)
    loss = step(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("select", MASKED.values(), ids=MASKED)
def test_one_graph_takes_any_number_of_rows(select: Select, dynamic: bool | None) -> None:
    model = MaskedLM()
    ids, some, labels = _batch()
    step = torch.compile(
        _step(select)(model),
        backend="mst",
        fullgraph=True,
        dynamic=dynamic,
        options={**STRICT, **CHUNKS},
    )
    few, one = torch.zeros_like(some), torch.zeros_like(some)
    few[1, 3:9], one[2, 7] = True, True
    for chosen in (some, few, torch.zeros_like(some), torch.ones_like(some), one):
        with torch._dynamo.config.patch(error_on_recompile=chosen is not some):
            got = _values(model, step, (ids, chosen, labels))
        right = _values(model, _step(select)(model), (ids, chosen, labels))
        for mine, eager in zip(got, right, strict=True):
            torch.testing.assert_close(mine, eager, equal_nan=True, rtol=1e-4, atol=1e-6)


# ---- a static number of rows ---------------------------------------------------------------------
def _rows(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1)[index], labels.flatten()[index])


def _index_select(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).index_select(0, index), labels.flatten()[index])


def _pairs(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    where = index // SHAPE[1], index % SHAPE[1] - SHAPE[1]  # those count from the end
    return F.cross_entropy(logits[where], labels[where])


def _grid(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    where = torch.arange(SHAPE[0])[:, None], index[:80].view(SHAPE[0], -1) % SHAPE[1]
    return F.cross_entropy(logits[where].flatten(0, 1), labels[where].flatten())


STATIC = (_rows, _index_select, _pairs, _grid)


def _indexed(pick: Callable[..., Tensor]) -> Callable[[Any], Callable[..., Tensor]]:
    return lambda model: (
        lambda ids, index, labels: pick(model.logits(model.hidden(ids)).float(), labels, index)
    )


@pytest.mark.parametrize("pick", STATIC)
def test_rows_by_indices(pick: Callable[..., Tensor]) -> None:
    ids, _, labels = _batch()
    index = torch.randint(160, (90,))  # some of them twice
    model = MaskedLM()
    report = check_against_float64(model, _indexed(pick), (ids, index, labels), **CHUNKS)
    assert [kind for kind, _ in kinds(report)] == ["lm_head"], str(report)
    assert report.regions[0].num_tokens == (80 if pick is _grid else 90)


# ---- what the rewrite makes ----------------------------------------------------------------------
def _normal_form(step: Callable[..., Tensor], *inputs: Any) -> JointGraph:
    return normalized(JointGraph(*joint_graph(step, *inputs)))[1]


@pytest.mark.parametrize("name", [n for n in ("after", "capped", "flat") if n in MASKED])
def test_no_logits_of_other_tokens_are_left(name: str) -> None:
    model, batch = MaskedLM(), _batch()
    graph = _normal_form(_step(MASKED[name])(model), *batch)
    values = [value for node in graph.nodes if (value := value_of(node)) is not None]
    shapes = [tuple(generic_shape(value)) for value in values]
    assert not any(shape[-1:] == (VOCAB,) and 160 in shape for shape in shapes)
    assert sum(n.target is torch.ops.aten.nonzero.default for n in graph.nodes) == 1


def _all_and_some(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    logits = model.logits(model.hidden(ids))
    return logits.logsumexp(-1).mean() + F.cross_entropy(logits[chosen], labels[chosen])


def _two_masks(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    logits, others = model.logits(model.hidden(ids)), ids % 3 == 0
    first = F.cross_entropy(logits[chosen], labels[chosen])
    return first + F.cross_entropy(logits[others], labels[others])


@pytest.mark.parametrize("select", [_all_and_some, _two_masks])
def test_a_selection_stays_where_other_tokens_are_used_as_well(select: Select) -> None:
    model, batch = MaskedLM(), _batch()
    graph = _normal_form(_step(select)(model), *batch)
    products = [n for n in graph.nodes if n.meta.get("val") is not None and "mm" in n.name]
    assert any(n.meta["val"].shape == (160, VOCAB) for n in products)
    report = check_against_float64(model, _step(select), batch, **CHUNKS)
    assert not report.regions
    assert any("picks tokens" in rejection.reason for rejection in report.rejections), report


def _columns(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    some = torch.arange(0, VOCAB, 2)
    return F.cross_entropy(
        model.logits(model.hidden(ids))[..., some].flatten(0, 1), ids.flatten() // 2
    )


def test_a_selection_of_columns_is_none_of_rows() -> None:
    model, batch = MaskedLM(), _batch()
    joint = JointGraph(*joint_graph(_step(_columns)(model), *batch))
    assert not any("index" in name for name in normalized(joint)[2])


def _over_the_rows(model: MaskedLM, ids: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    logits = model.logits(model.hidden(ids))[chosen].float()
    return -logits.log_softmax(0).gather(1, labels[chosen][:, None]).mean()


def test_what_mixes_the_rows_of_a_mask_is_refused_by_name() -> None:
    model, batch = MaskedLM(), _batch()
    report = check_against_float64(model, _step(_over_the_rows), batch, chunk_tokens=16)
    assert all(region.axis != "tokens" for region in report.regions)
    assert report.rejections, report


# ---- memory --------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.kernels
@pytest.mark.parametrize(("name", "most"), [("before", 0.75), ("after", 0.35)])
def test_the_peak_is_a_fraction_of_inductors(name: str, most: float) -> None:
    """Gradients of weights are more than half of the peak where tokens are chosen before."""
    vocab, width = 8000, 64
    model = MaskedLM(vocab, width)
    ids, chosen, labels = _batch((8, 128), 0.15)
    peaks = {}
    for backend, options in (("inductor", None), ("mst", {"memory_budget": 0.0})):
        torch.compiler.reset()
        step = torch.compile(_step(MASKED[name])(model), backend=backend, options=options)
        _values(model, step, (ids, chosen, labels))
        model.zero_grad(set_to_none=True)
        peaks[backend] = measure.peak_bytes(lambda: step(ids, chosen, labels).backward())  # noqa: B023
    assert peaks["mst"] < most * peaks["inductor"], peaks
