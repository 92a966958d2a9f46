"""Plans for ranges of lengths under the modes of torch.compile, and what a call of one costs."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mstpass
from mstpass import backend
from mstpass.limit import Limit
from mstpass.out_of_memory import CompiledPlan, LeanerPlans
from mstpass.plans import Outcome
from mstpass.plans_by_length import PlansByLength
from mstpass.report.report import Report
from tests.checks import check_step, errors, gradients
from tests.models import TinyLM, next_token_loss
from tests.test_plans_by_length import VOCAB, D, _ids, _loss_of

pytestmark = pytest.mark.op_by_op

LENGTHS = (300, 1000, 2000, 64)


@pytest.fixture
def model() -> TinyLM:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return TinyLM(VOCAB, D)


def _batches() -> list[list[torch.Tensor]]:
    return [[_ids(1, length)] for length in LENGTHS]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_all_plans_are_compiled_in_the_mode(
    mode: str, model: TinyLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    compile_fx = backend.compile_fx

    def noted(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["config_patches"])
        return compile_fx(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_fx", noted)
    before = len(mstpass.reports())
    step = mstpass.compile(_loss_of(model), mode=mode, dynamic=True, strict=True)
    check_step(step, model, _loss_of, _batches())
    reports = mstpass.reports()[before:]
    assert [report.outcome.peaks[0].sizes[0][1] for report in reports] == [1024, 4096]
    of_mode = torch._inductor.list_mode_options(mode, dynamic=True)
    assert len(given) >= 2 and all(of_mode.items() <= patches.items() for patches in given)


def test_a_static_graph_and_then_ranges_have_right_gradients(model: TinyLM) -> None:
    """``dynamic=None``: the first length is static, the second one makes the graph symbolic."""
    before = len(mstpass.reports())
    check_step(mstpass.compile(_loss_of(model), strict=True), model, _loss_of, _batches())
    ends = [r.outcome.peaks[0].sizes[0][1] if r.outcome.peaks else None for r in reports_of(before)]
    assert ends == [None, 1024, 4096]


def test_a_float_of_a_module_in_every_plan(model: TinyLM) -> None:
    """Under ``dynamic=True`` a Python float is a symbol too: each plan reads it anew."""
    model.scale = 0.5

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(model, ids) * model.scale

    step, before = mstpass.compile(loss, dynamic=True, strict=True), len(mstpass.reports())
    for length in (300, 2000):
        ids = _ids(1, length)
        found, right = gradients(model, step, [ids]), gradients(model, loss, [ids])
        assert max(errors(found, right)) < 1e-5, length
    assert len(reports_of(before)) == 2 and all(r.outcome.peaks for r in reports_of(before))


def reports_of(before: int) -> list[Report]:
    return list(mstpass.reports()[before:])


def test_the_choice_and_the_wrapper_take_little_time() -> None:
    """Both together, without random numbers: what each call of a plan costs beyond the plan."""

    def run(*args: Any) -> None:
        return None

    functions: Any = types.SimpleNamespace(on_error=None, writes_inputs=False)
    plan = CompiledPlan(run, functions, Limit(), Report(Outcome()))
    wrapped = LeanerPlans(plan, torch.device("cpu"), None, strict=True)
    plans: Any = PlansByLength.__new__(PlansByLength)
    plans._sizes_of, plans._chosen = lambda args: args[0], {300: wrapped}
    args = (300, *[None] * 200)
    best = min(_seconds(plans, args) for _ in range(500))
    assert best < 20e-6


def _seconds(call: Callable[..., Any], args: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start
