"""What users are told of a length that no plan serves, and of ``lengths`` that never come."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mstpass
from mstpass.plans_by_length import PlansByLength
from tests.checks import gradients, op_by_op
from tests.models import TinyLM
from tests.test_plans_by_length import _compiled, _loss_of

pytestmark = pytest.mark.op_by_op


def _new_model() -> TinyLM:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return TinyLM(800, 64)


@pytest.fixture
def model() -> TinyLM:
    return _new_model()


def _words(length: int) -> torch.Tensor:
    return torch.randint(800, (1, length))


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """With the least memory, of 4096 words and of half of them."""
    with op_by_op():
        model = _new_model()
        gradients(model, _compiled(_loss_of(model), memory_budget=0.0), [_words(4000)])
    longest, half, _ = mstpass.reports()[-1].outcome.peaks
    return longest.peak_bytes, half.peak_bytes


def _caught(step: Any, model: TinyLM, length: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(model, step, [_words(length)])
    said = (str(w.message) for w in caught)
    return list(dict.fromkeys(text for text in said if "mstpass" in text))


def _ends(before: int) -> list[int]:
    """The largest lengths of the plans that were made since."""
    reports = mstpass.reports()[before:]
    return sorted(size for r in reports for _, size in r.outcome.peaks[0].sizes)


# ---- budgets -------------------------------------------------------------------------------------
def test_a_length_that_no_plan_serves_is_an_error_that_says_what_fits(
    peaks: tuple[int, int], model: TinyLM
) -> None:
    at_4096, at_2048 = peaks
    step = _compiled(_loss_of(model), memory_budget=(at_4096 + at_2048) // 2)
    gradients(model, step, [_words(1500)])
    with pytest.raises(Exception, match="cannot be met: the lowest peak found is") as caught:
        step(_words(4000))
    said = " ".join(str(caught.value).split())
    assert "This is at ids.size()[1] = 4000. The budget holds up to ids.size()[1] = " in said
    longest = int(said.split("holds up to ids.size()[1] = ")[1].split(".")[0])
    assert 2048 <= longest < 4000
    gradients(model, step, [_words(longest * 15 // 16)])  # its own plan may have other chunks


def test_without_strict_it_is_a_warning_about_the_range(
    peaks: tuple[int, int], model: TinyLM
) -> None:
    at_4096, at_2048 = peaks
    budget = at_2048 + (at_4096 - at_2048) // 4
    step = _compiled(_loss_of(model), memory_budget=budget, strict=False)
    (said,) = _caught(step, model, 3500)
    assert "This is at ids.size()[1] = 4096. The budget holds up to" in said
    assert any("The budget holds up to" in note for note in mstpass.reports()[-1].outcome.notes)


def test_a_budget_that_holds_for_no_length(model: TinyLM) -> None:
    step = _compiled(_loss_of(model), memory_budget=1000, strict=False)
    (said,) = _caught(step, model, 1000)
    assert "The budget holds for no length" in said


def test_a_static_size_has_no_other_lengths(model: TinyLM) -> None:
    step = _compiled(_loss_of(model), False, memory_budget=1000, strict=False)
    (said,) = _caught(step, model, 1000)
    assert "cannot be met" in said and "This is at" not in said


# ---- lengths -------------------------------------------------------------------------------------
def test_lengths_of_a_static_graph_have_no_effect(model: TinyLM) -> None:
    step = _compiled(_loss_of(model), False, lengths="256..1024")
    with pytest.warns(UserWarning, match="'lengths' has no effect .* Compile with dynamic=True"):
        gradients(model, step, [_words(300)])


def test_lengths_of_a_graph_without_a_backward_are_no_mistake(model: TinyLM) -> None:
    """Evaluation is compiled with the options of training."""
    step = _compiled(_loss_of(model), False, lengths="256..1024")
    with torch.no_grad():
        step(_words(300))


def test_lengths_beyond_a_bound_are_not_compiled(
    model: TinyLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PlansByLength] = []
    add_first = PlansByLength.add_first
    monkeypatch.setattr(
        PlansByLength, "add_first", lambda self: (made.append(self), add_first(self))
    )
    ids = _words(900)
    torch._dynamo.mark_dynamic(ids, 1, min=200, max=2000)
    gradients(model, _compiled(_loss_of(model), None, lengths="64..16384"), [ids])
    assert sorted(list(plan.most.values()) for plan in made[0].plans) == [[256], [1024], [2000]]


def test_lengths_that_a_guard_forbids(model: TinyLM) -> None:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        return _loss_of(model)(ids) if ids.shape[1] < 2000 else model.head.weight.sum()

    before = len(mstpass.reports())
    gradients(model, _compiled(loss, lengths=[512, 8192]), [_words(300)])
    assert _ends(before) == [512, 1999]


def test_lengths_that_no_batch_has(model: TinyLM) -> None:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] % 300 == 0:
            return _loss_of(model)(ids)
        return model.head.weight.sum()

    step = _compiled(loss, lengths=[300, 8699])
    with pytest.warns(UserWarning, match=r"no batch of ids.size\(\)\[1\] = 8699 takes this graph"):
        gradients(model, step, [_words(300)])


def test_lengths_that_are_not_multiples_of_what_a_guard_asks_for(model: TinyLM) -> None:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] % 8:
            return model.head.weight.sum()
        return _loss_of(model)(ids)

    before = len(mstpass.reports())
    step = _compiled(loss, lengths=[300, 1001])
    gradients(model, step, [_words(200)])
    assert _ends(before) == [296, 1000]
    gradients(model, step, [_words(992)])
    assert len(mstpass.reports()) == before + 2
