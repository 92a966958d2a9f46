"""``mstpass.explain_all``: functions that compile to several graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.torch_internals.fake_tensors import FakeTensor

# Dynamo asks for the gradient of what crosses from one graph to the next
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

head, encoder = nn.Linear(16, 600), nn.Linear(16, 16)
hidden, labels = torch.randn(512, 16), torch.zeros(512, dtype=torch.long)
optimizer = torch.optim.AdamW([*head.parameters(), *encoder.parameters()])
ran: list[Tensor] = []


@torch.compile(backend="mst")
def encode(x: Tensor) -> Tensor:
    return encoder(x).relu()


@torch.compile
def loss_of(h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(head(h), y)


def one_graph(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(head(encoder(x)), y)


def breaks(x: Tensor, y: Tensor) -> Tensor:
    h = encoder(x).relu()
    torch._dynamo.graph_break()
    ran.append(h)
    return F.cross_entropy(head(h), y)


def two_models(x: Tensor, y: Tensor) -> Tensor:
    return loss_of(encode(x), y)


def whole_step(x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = one_graph(x, y)
    loss.backward()
    optimizer.step()
    return loss


def reads_its_loss(x: Tensor, y: Tensor) -> Tensor:
    loss = one_graph(x, y)
    return loss * 2 if loss > 3 else loss


def picks_tokens(x: Tensor, y: Tensor) -> Tensor:
    logits = head(encoder(x))
    kept = y != -100
    return F.cross_entropy(logits[kept], y[kept])


def fails_late(x: Tensor, y: Tensor) -> Any:
    return {}[one_graph(x, y)]


def _kinds(fn: Callable[..., Any], **options: Any) -> list[list[str]]:
    reports = mstpass.explain_all(fn, hidden, labels, options=options)
    return [[region.kind for region in report.regions] for report in reports]


def test_one_graph_is_what_explain_says() -> None:
    (report,) = mstpass.explain_all(one_graph, hidden, labels)
    assert report.outcome == mstpass.explain(one_graph, hidden, labels).outcome


@pytest.mark.parametrize("fn", [breaks, torch.compile(breaks), two_models])
def test_a_report_for_each_graph(fn: Callable[..., Any]) -> None:
    ran.clear()
    assert _kinds(fn, chunk_tokens=128) == [[], ["lm_head"]]
    assert all(isinstance(h, FakeTensor) for h in ran)


def test_notes_say_where_a_graph_ends_and_whose_it_is() -> None:
    line = breaks.__code__.co_firstlineno + 2
    first, second = mstpass.explain_all(breaks, hidden, labels)
    assert f"test_explain_all.py:{line}: " in first.outcome.notes[0] and not second.outcome.notes
    first, second = mstpass.explain_all(two_models, hidden, labels)
    assert "two_models is not compiled" in str(first) and not second.outcome.notes
    assert len(_kinds(torch.compile(two_models))) == 1  # as Dynamo has it


def test_meta_tensors_and_keywords() -> None:
    with torch.device("meta"):
        large, x = nn.Linear(16, 100_000), torch.zeros(2**17, 16)
        y = torch.zeros(2**17, dtype=torch.long)

    def step(x: Tensor, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.cross_entropy(large(x), y)

    (report,) = mstpass.explain_all(step, x=x, y=y)
    assert [region.kind for region in report.regions] == ["lm_head"]
    assert large.weight.device.type == "meta"


@pytest.mark.parametrize(
    ("fn", "line", "why"),
    [
        (whole_step, 4, "an optimizer steps"),
        (reads_its_loss, 2, "depends on the value of a tensor"),
        (fails_late, 1, "KeyError"),
    ],
)
def test_what_cannot_be_explained_is_said(fn: Callable[..., Any], line: int, why: str) -> None:
    report = mstpass.explain_all(fn, hidden, labels, options={"free_overhead": 1.0})[-1]
    note = report.outcome.notes[-1]
    line += fn.__code__.co_firstlineno
    assert note.startswith(
        f"the rest of the function is not explained: test_explain_all.py:{line}: "
    )
    assert why in note and [region.kind for region in report.regions] == ["lm_head"]


def test_logits_that_a_break_makes_an_output() -> None:
    (report,) = mstpass.explain_all(picks_tokens, hidden, labels)
    (rejection,) = report.rejections
    line = picks_tokens.__code__.co_firstlineno + 3
    assert "are an output" in rejection.reason
    assert all("ignore_index" in note for note in report.outcome.notes)
    assert f"breaks it, at test_explain_all.py:{line}: " in report.outcome.notes[0]


def test_errors_before_there_is_a_graph() -> None:
    def early(x: Tensor, y: Tensor) -> Any:
        torch._dynamo.graph_break()
        return [][len(x)]

    with pytest.raises(mstpass.ExplainError, match=r"test_explain_all.py:\d+: .*IndexError"):
        mstpass.explain_all(early, hidden, labels)
    with pytest.raises(mstpass.ExplainError, match=r"no backward.*returns the loss"):
        mstpass.explain_all(lambda x: x.sum(), hidden)
    with pytest.raises(mstpass.OptionError, match="chunk_tokens"):
        mstpass.explain_all(one_graph, options={"chunk_tokenz": 3})
    with pytest.raises(mstpass.ExplainError, match="not a function"):
        mstpass.explain_all(3)  # type: ignore[arg-type]


def test_it_disturbs_nothing() -> None:
    compiles = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiles.append(gm)
        return gm

    compiled = torch.compile(breaks, backend=backend)
    ran.clear()
    compiled(hidden, labels).backward()
    gradient = head.weight.grad
    assert gradient is not None and len(compiles) == 2
    weight, state = head.weight, torch.get_rng_state()
    for fn in (compiled, breaks, whole_step):
        mstpass.explain_all(fn, torch.zeros(300, 16), torch.zeros(300, dtype=torch.long))
    ran.clear()  # Dynamo guards what is in it
    compiled(hidden, labels)
    assert len(compiles) == 2
    ran.clear()
    compiled(hidden[:400], labels[:400])  # the first other size makes it dynamic: 300 was none
    assert len(compiles) == 4
    assert head.weight is weight and weight.grad is gradient
    assert torch.equal(state, torch.get_rng_state()) and not optimizer.state
    head.weight.grad = None
