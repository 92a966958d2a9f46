"""A new op is one row: with it, a custom op runs in a loop; without it, the loop ends there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

import mstpass
from mstpass.graph import op_table, ops
from mstpass.graph.linearity import first_only, never
from mstpass.graph.op_rows.elementwise import pointwise
from mstpass.graph.op_rows.row import CHEAP, PINNED
from tests.checks import check_against_float64, compiled, kinds
from tests.models import TinyLM

pytestmark = pytest.mark.op_by_op
VOCAB, D, CAP = 600, 32, 5.0
_LIBRARY = library.Library("mstpass_tests", "FRAGMENT")
_LIBRARY.define("soft_cap(Tensor x) -> Tensor")
_LIBRARY.define("soft_cap_backward(Tensor gradient, Tensor y) -> Tensor")
_LIBRARY.impl("soft_cap", lambda x: CAP * torch.tanh(x / CAP), "CompositeExplicitAutograd")
_LIBRARY.impl(
    "soft_cap_backward",
    lambda gradient, y: gradient * (1 - (y / CAP) ** 2),
    "CompositeExplicitAutograd",
)
soft_cap = torch.ops.mstpass_tests.soft_cap.default
soft_cap_backward = torch.ops.mstpass_tests.soft_cap_backward.default
library.register_autograd(
    "mstpass_tests::soft_cap",
    lambda ctx, gradient: soft_cap_backward(gradient, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    lib=_LIBRARY,
)


@pytest.fixture
def linear() -> object:
    """The linear rule of the backward's row."""
    return first_only


@pytest.fixture
def rows(linear: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op table with a row for each of the two ops."""
    found = (op_table.row_of, ops.with_token_rules)
    monkeypatch.setitem(op_table.TABLE, soft_cap, pointwise())
    monkeypatch.setitem(op_table.TABLE, soft_cap_backward, pointwise(linear))
    for cached in found:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in found:
        cached.cache_clear()


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = soft_cap(model.logits(ids))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.usefixtures("rows")
def test_with_its_row_it_runs_in_a_loop() -> None:
    assert op_table.row_of(soft_cap).repeats == CHEAP
    ids = torch.randint(VOCAB, (2, 96))
    report = check_against_float64(
        TinyLM(VOCAB, D), lambda model: lambda ids: _loss(model, ids), [ids], chunk_tokens=64
    )
    assert kinds(report) == [("lm_head", "fused")], report
    (region,) = report.outcome.regions
    assert {"soft_cap_default", "soft_cap_backward_default"} <= dict(region.members).keys()


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("linear", [never])
def test_a_row_that_is_not_linear_is_not_fused(linear: object) -> None:
    model = TinyLM(VOCAB, D)
    compiled(lambda ids: _loss(model, ids), chunk_tokens=64)(torch.randint(VOCAB, (2, 96)))
    assert ("lm_head", "fused") not in kinds(mstpass.reports()[-1])


def test_without_a_row_it_does_not() -> None:
    assert op_table.row_of(soft_cap).repeats == PINNED
    model = TinyLM(VOCAB, D)
    compiled(lambda ids: _loss(model, ids), chunk_tokens=64)(torch.randint(VOCAB, (2, 96)))
    report = mstpass.reports()[-1]
    assert not kinds(report)
    assert any("soft_cap" in str(rejection) for rejection in report.outcome.rejections), report
