"""Graphs of symbolic sizes have a plan for each range of lengths, and every batch takes its own."""

from __future__ import annotations

import dataclasses
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass import backend, plans_by_length
from mstpass.options import OptionError
from mstpass.plans_by_length import PlansByLength
from mstpass.torch_internals.batch_sizes import at_sizes
from mstpass.torch_internals.caches import counters
from tests.checks import STRICT, check_step, gradients
from tests.models import TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op

D, VOCAB = 32, 4000


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape)


def _loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda ids: next_token_loss(model, ids)


def _compiled(fn: Callable[..., Any], dynamic: bool | None = True, **options: Any) -> Any:
    return torch.compile(fn, backend="mst", dynamic=dynamic, options={**STRICT, **options})


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return TinyLM(VOCAB, D)


@pytest.fixture
def dispatchers(monkeypatch: pytest.MonkeyPatch) -> list[PlansByLength]:
    """All that are made during the test."""
    made: list[PlansByLength] = []
    init = PlansByLength.__init__

    def noted(self: PlansByLength, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(PlansByLength, "__init__", noted)
    return made


def _ends(report: mstpass.Report) -> list[int]:
    return [size for _, size in report.outcome.peaks[0].sizes]


# ---- ranges --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("budget", ["free", 0.0])
def test_each_range_has_a_plan_and_right_gradients(model: nn.Module, budget: Any) -> None:
    step, before = _compiled(_loss_of(model), memory_budget=budget), len(mstpass.reports())
    graphs = counters["stats"]["unique_graphs"]
    batches = [[_ids(1, length)] for length in (300, 1000, 1100, 4000, 257, 64, 3)]
    check_step(step, model, _loss_of, batches)
    reports = mstpass.reports()[before:]
    assert [_ends(report) for report in reports] == [[1024], [4096]]
    assert counters["stats"]["unique_graphs"] - graphs == 1, "Dynamo traces once"


@pytest.mark.parametrize("budget", ["free", 0.0])
def test_a_plan_is_that_of_the_longest_batch_of_static_size(model: nn.Module, budget: Any) -> None:
    gradients(model, _compiled(_loss_of(model), memory_budget=budget), [_ids(1, 900)])
    dynamic = mstpass.reports()[-1]
    torch._dynamo.reset()
    gradients(model, _compiled(_loss_of(model), False, memory_budget=budget), [_ids(1, 1024)])
    static = mstpass.reports()[-1]
    assert dynamic.regions and [r.mode for r in dynamic.regions] == [r.mode for r in static.regions]
    assert dynamic.outcome.peak_bytes <= 1.03 * static.outcome.peak_bytes


def test_the_peaks_of_other_lengths_are_those_of_their_simulation(model: nn.Module) -> None:
    gradients(model, _compiled(_loss_of(model), memory_budget=0.0), [_ids(1, 900)])
    outcome = mstpass.reports()[-1].outcome
    at_1024, at_512, at_256 = outcome.peaks
    assert at_1024.peak_bytes == outcome.peak_bytes
    assert at_1024.peak_bytes > at_512.peak_bytes > at_256.peak_bytes
    assert at_512.sizes == (("ids.size()[1]", 512),)
    text = str(mstpass.reports()[-1])
    assert "planned for ids.size()[1] up to 1024; simulated peak" in text
    assert "1024 tokens at most, in chunks of up to" in text


@pytest.mark.kernels
def test_a_short_range_takes_a_longer_plan_until_it_comes_often(
    model: nn.Module, dispatchers: list[PlansByLength]
) -> None:
    step = _compiled(_loss_of(model))
    gradients(model, step, [_ids(1, 4000)])
    for number in range(plans_by_length._OFTEN - 1):
        gradients(model, step, [_ids(1, 300 + number)])
    assert len(dispatchers[-1].plans) == 1
    gradients(model, step, [_ids(1, 700)])
    assert [list(plan.most.values()) for plan in dispatchers[-1].plans] == [[4096], [1024]]


def test_a_checkpoint_runs_the_plan_of_its_forward_again(model: nn.Module) -> None:
    """The two runs save as many values, though a plan for this length is made between them."""
    step = _compiled(_loss_of(model))
    gradients(model, step, [_ids(1, 4000)])
    lengths = [*range(300, 304), *[300] * 10]
    held = [checkpoint(step, _ids(1, n), use_reentrant=False) for n in lengths]
    torch.stack(held).sum().backward()
    assert len(held) > plans_by_length._OFTEN


def test_several_sizes_have_shorter_ranges(
    model: nn.Module, dispatchers: list[PlansByLength]
) -> None:
    step = _compiled(_loss_of(model))
    for shape in ((3, 300), (4, 500), (2, 512)):
        gradients(model, step, [_ids(*shape)])
    plans = dispatchers[-1]
    assert [list(plan.most.values()) for plan in plans.plans] == [[4, 512]]


def test_marked_bounds_end_the_last_range(
    model: nn.Module, dispatchers: list[PlansByLength]
) -> None:
    ids = _ids(1, 900)
    torch._dynamo.mark_dynamic(ids, 1, min=2, max=1000)
    gradients(model, _compiled(_loss_of(model), None), [ids])
    assert [list(plan.most.values()) for plan in dispatchers[-1].plans] == [[1000]]


def test_the_second_length_of_a_static_graph_begins_ranges(model: nn.Module) -> None:
    step = _compiled(_loss_of(model), None)
    for length in (300, 400, 2000):
        gradients(model, step, [_ids(1, length)])
    assert [len(r.outcome.peaks) for r in mstpass.reports()[-3:]] == [0, 3, 3]


def test_a_graph_without_large_parts_has_one_plan(dispatchers: list[PlansByLength]) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)
    step = _compiled(lambda x: layer(x).sin().sum())
    before = len(mstpass.reports())
    for length in (10, 100, 5000):
        gradients(layer, step, [torch.randn(length, 8, requires_grad=True)])
    assert len(mstpass.reports()) - before == 1
    assert not dispatchers[-1].plans[0].most


@pytest.mark.kernels
def test_the_batch_that_was_traced_is_not_kept(model: nn.Module) -> None:
    step, ids = _compiled(_loss_of(model)), _ids(1, 300)
    gone = weakref.ref(ids)
    step(ids).backward()
    del ids
    gc.collect()
    assert gone() is None


def test_the_choice_takes_little_time(model: nn.Module, dispatchers: list[PlansByLength]) -> None:
    gradients(model, _compiled(_loss_of(model)), [_ids(1, 300)])
    plans = dispatchers[-1]
    position = next(i for i, x in enumerate(plans.graph.inputs) if isinstance(x, torch.SymInt))
    args = [0] * len(plans.graph.inputs)
    args[position] = 300
    plans._chosen[300] = lambda *args: None
    best = min(_seconds(lambda: plans(*args)) for _ in range(200))
    assert best < 20e-6


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- budgets -------------------------------------------------------------------------------------
def test_a_budget_is_kept_as_far_as_it_can_be(dispatchers: list[PlansByLength]) -> None:
    """Where the longest batch of a range exceeds it, shorter ones are planned for."""
    torch._dynamo.reset()
    model = TinyLM(800, 256)
    words = torch.randint(800, (1, 4000))
    gradients(model, _compiled(_loss_of(model), memory_budget=0.0), [words])
    at_4096, at_2048, _ = mstpass.reports()[-1].outcome.peaks
    between = (at_4096.peak_bytes + at_2048.peak_bytes) // 2
    assert between > 1.2 * at_2048.peak_bytes
    torch._dynamo.reset()
    dispatchers.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = _compiled(_loss_of(model), memory_budget=between, strict=False)
        gradients(model, step, [words[:, :1100]])
        assert not [str(w.message) for w in caught if "mstpass" in str(w.message)]
        outcome = mstpass.reports()[-1].outcome
        (most,) = dispatchers[-1].plans[0].most.values()
        assert 1100 <= most < 4096 and outcome.peak_bytes <= between
        gradients(model, step, [words])
    assert any("lowest peak" in str(w.message) for w in caught)
    assert dispatchers[-1].plans[-1].most and _ends(mstpass.reports()[-1]) == [4096]
    (_, length), *_ = mstpass.reports()[-1].outcome.budget_holds_for
    text = " ".join(str(mstpass.reports()[-1]).split())
    assert 2000 < length < 4096 and f"the budget holds up to {length}" in text


# ---- lengths -------------------------------------------------------------------------------------
def test_lengths_are_compiled_in_the_first_call(
    model: nn.Module, dispatchers: list[PlansByLength]
) -> None:
    step = _compiled(_loss_of(model), lengths="200..3000")
    gradients(model, step, [_ids(1, 300)])
    made = [list(plan.most.values()) for plan in dispatchers[-1].plans]
    assert sorted(made) == [[256], [1024], [3000]]
    reports = len(mstpass.reports())
    for length in (200, 1000, 2900):
        gradients(model, step, [_ids(1, length)])
    assert len(mstpass.reports()) == reports


def test_lengths_that_the_graph_does_not_have(model: nn.Module) -> None:
    step = _compiled(_loss_of(model), lengths=[64, 256])
    with pytest.raises(Exception, match=r"'lengths' ends at 256, but .* ids.size\(\)\[1\] = 300"):
        step(_ids(1, 300))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("256", "a range such as"),
        ("300..200", "ascend"),
        ([512, 256], "ascend"),
        ([1, 2], "at least 2"),
        ([2.5], "a list of lengths"),
        (7, "a list of lengths"),
    ],
)
def test_bad_lengths(value: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        mstpass.compile(lambda x: x, lengths=value)


# ---- what goes wrong -----------------------------------------------------------------------------
def test_a_later_plan_that_fails_leaves_its_range_to_inductor(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _compiled(_loss_of(model), strict=False)
    gradients(model, step, [_ids(1, 300)])
    monkeypatch.setattr(backend, "compile_fx", _fails)
    ids = _ids(1, 2000)
    with pytest.warns(UserWarning, match="left batches of this length to Inductor"):
        ours = gradients(model, step, [ids])
    for mine, eager in zip(ours, gradients(model, _loss_of(model), [ids]), strict=True):
        torch.testing.assert_close(mine, eager)


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("no")


def test_stances_forbid_compilations(model: nn.Module) -> None:
    step, long = _compiled(_loss_of(model)), _ids(1, 2000)
    gradients(model, step, [_ids(1, 300)])
    before = len(mstpass.reports())
    with torch.compiler.set_stance("eager_on_recompile"):
        ours = gradients(model, step, [long])
    for mine, eager in zip(ours, gradients(model, _loss_of(model), [long]), strict=True):
        torch.testing.assert_close(mine, eager)
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.raises(RuntimeError, match=r"no plan for .* ids.size\(\)\[1\] = 2000"):
            step(long)
        step(_ids(1, 301))
    assert len(mstpass.reports()) == before


def test_a_condition_of_one_plan_is_none_of_the_others(
    model: nn.Module, dispatchers: list[PlansByLength]
) -> None:
    """Guards that a compilation adds hold for its plan alone, and Dynamo compiles nothing again."""
    compile_one = PlansByLength._compiled

    def with_guard(self: PlansByLength, *args: Any, **kwargs: Any) -> Any:
        compiled = self.compile_one

        def guarding(graph: Any, limit: Any) -> Any:
            size = next(x for x in graph.inputs if isinstance(x, torch.SymInt))
            assert (size > 1000) is not None and bool(size > 1000) in (True, False)
            return compiled(graph, limit)

        self.compile_one = guarding  # type: ignore[method-assign]
        try:
            return compile_one(self, *args, **kwargs)
        finally:
            self.compile_one = compiled  # type: ignore[method-assign]

    graphs = counters["stats"]["unique_graphs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlansByLength, "_compiled", with_guard)
        step = _compiled(_loss_of(model))
        for length in (900, 1024, 300):
            ids = _ids(1, length)
            ours = gradients(model, step, [ids])
            for mine, eager in zip(ours, gradients(model, _loss_of(model), [ids]), strict=True):
                torch.testing.assert_close(mine, eager, atol=1e-5, rtol=1e-4)
    plans = dispatchers[-1]
    found = [(max(plan.most.values()), len(plan.conditions)) for plan in plans.plans]
    assert found == [(1024, 1), (1000, 0)], "each side of the guard has one, made once"
    assert counters["stats"]["unique_graphs"] - graphs == 1


def test_a_condition_on_a_stride_is_asked_of_each_batch(
    model: nn.Module, dispatchers: list[PlansByLength]
) -> None:
    """A plan whose compilation compared a stride serves no batch of which that is not known."""
    stream = _ids(2, 301)
    step = _compiled(_loss_of(model))
    gradients(model, step, [stream[:, :-1]])
    plans = dispatchers[-1]
    (stride,) = set(plans.symbols) - plans.sized
    plan = dataclasses.replace(plans.plans[0], conditions=(stride < 400,))
    near, far = ({**dict.fromkeys(plans.symbols, 2), stride: s} for s in (399, 400))
    assert plan.serves(near) and not plan.serves(far)
    other = sympy.Symbol("elsewhere", integer=True)
    assert not dataclasses.replace(plan, conditions=(other < 400,)).serves(near)


def test_the_environment_of_a_range_is_restored_whatever_its_attributes_became() -> None:
    """Inductor's estimates of sizes on a GPU make a dict of what was None, and fill it."""
    environment: Any = ShapeEnv()
    environment.deferred_runtime_asserts[None] = ["one"]
    before = dict(vars(environment))
    with at_sizes(environment, {}):
        environment.tracked_fakes = {"a": 1}
        environment.deferred_runtime_asserts[None].append("another")
        environment.replacements = None
        environment.new = []
    assert environment.deferred_runtime_asserts == {None: ["one"]}
    assert environment.tracked_fakes is None and environment.replacements == {}
    assert vars(environment).keys() == before.keys()
