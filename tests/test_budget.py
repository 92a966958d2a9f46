"""A memory budget is met by the measured peak, or refused with the lowest one that there is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass import pipeline, stages
from mstpass.backend import MstpassError
from mstpass.bench.models import LlamaSize, llama
from mstpass.measure import peak_bytes
from mstpass.memory import device_budget
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_plan import simulate_plan, step_memory, step_us
from mstpass.memory.timeline import Moment, StepMemory
from mstpass.options import Options
from mstpass.partition.budget import MEASURED_OVER_SIMULATED, memory_of
from mstpass.partition.solvers import SOLVERS
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Loop, Mode, Plan, RegionModes, Result, Value
from tests.checks import check_against_float64, compiled, joint_graph

SIZE = LlamaSize(128, 4, 4, 352, 6000, 1024)
SMALL_HEAD = LlamaSize(128, 4, 4, 512, 300, 1024)
_ABOVE = 1.05  # times the lowest simulated peak: a budget that can be met


def _problem(size: LlamaSize) -> CutProblem:
    model, ids, target = llama(size, torch.device("cpu"))
    joint, outputs = joint_graph(lambda ids, target: model(ids, target), ids, target)
    options = Options(memory_budget=0.5)
    result = pipeline.run(joint, options, num_fwd_outputs=outputs, stop_after="plan")
    assert result.problem is not None
    return result.problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", ["free", 0.3, 0.0])
def test_plans_are_simulated_as_the_graphs_they_become(
    budget: str | float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for values that are recomputed once more, which are no part of a plan."""
    monkeypatch.setattr(
        stages, "add_second_rematerialization", lambda modules, memory, _: (modules, memory)
    )
    model, ids, target = llama(SIZE, torch.device("cpu"))
    model = model.to(dtype)
    joint, outputs = joint_graph(lambda ids, target: model(ids, target), ids, target)
    options = Options(memory_budget=budget, reconstruct="off")
    result = pipeline.run(joint, options, num_fwd_outputs=outputs)
    assert result.problem is not None and result.modules is not None
    real = simulate_step(*(module.graph for module in result.modules))
    plan = stages._solve(result.problem, options, None, "")
    planned = memory_of(result.problem, plan)
    assert planned.forward.peak.bytes == pytest.approx(real.forward.peak.bytes, rel=0.01)
    assert planned.backward.peak.bytes == pytest.approx(real.backward.peak.bytes, rel=0.01)


def test_operands_that_no_view_shows_token_by_token_are_planned() -> None:
    """``logits[:, :-1]`` of two sequences: the loop reads a copy of all but the last states."""
    weight = torch.randn(4096, 64, requires_grad=True)
    states, target = torch.randn(2, 512, 64, requires_grad=True), torch.randint(4096, (2, 512))

    def loss(states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = (states @ weight.T)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    joint, outputs = joint_graph(loss, states, target)
    options = Options(memory_budget=0.5)
    result = pipeline.run(joint, options, num_fwd_outputs=outputs)
    assert result.problem is not None and result.modules is not None
    real = simulate_step(*(module.graph for module in result.modules))
    planned = memory_of(result.problem, stages._solve(result.problem, options, None, ""))
    assert [region.mode for region in result.outcome.regions] == ["fused"]
    assert planned.forward.peak.bytes == pytest.approx(real.forward.peak.bytes, rel=0.001)


@pytest.mark.parametrize("size", [SIZE, SMALL_HEAD])
def test_less_budget_never_means_more_peak_nor_less_time(size: LlamaSize) -> None:
    problem = _problem(size)
    solve = SOLVERS["peak_search"]
    free, least = (memory_of(problem, solve(problem, b)).peak_bytes for b in (None, 0))
    assert least < 0.6 * free
    peaks, times = [], []
    for budget in range(least, free, (free - least) // 9):
        plan = solve(problem, budget)
        step = simulate_plan(problem, plan)
        peaks.append(step.peak_bytes)
        times.append(step.us)
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks)
    assert len(set(peaks)) >= 4, "a stair of one step"
    assert times[0] > times[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "share"),
    [
        (SIZE, 0.15),
        pytest.param(SIZE, 0.6, marks=pytest.mark.full),
        pytest.param(SMALL_HEAD, 0.3, marks=pytest.mark.full),
    ],
)
def test_the_measured_peak_stays_within_a_budget_in_bytes(size: LlamaSize, share: float) -> None:
    problem = _problem(size)
    solve = SOLVERS["peak_search"]
    free, least = (memory_of(problem, solve(problem, b)).peak_bytes for b in (None, 0))
    budget = int(_ABOVE * (least + share * (free - least)))
    model, ids, target = llama(size, torch.device("cpu"))
    step = compiled(lambda ids, target: model(ids, target), memory_budget=budget)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        step(ids, target).backward()

    run()
    model.zero_grad(set_to_none=True)
    assert peak_bytes(run) <= budget
    report = mstpass.reports()[-1]
    assert report.peak_bytes is not None and report.baseline_peak_bytes is not None
    assert report.peak_bytes <= budget < report.baseline_peak_bytes
    assert report.extra_time is not None and 0 < report.extra_time < 1


@pytest.mark.slow
@pytest.mark.parametrize("budget", [pytest.param(0.5, marks=pytest.mark.full), 0.2])
def test_gradients_are_right_between_the_ends(budget: float) -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    report = check_against_float64(
        model, lambda m: lambda ids, target: m(ids, target), [ids, target], memory_budget=budget
    )
    assert report.outcome.save_plan is not None
    assert report.outcome.save_plan.solver == "peak_search"


def test_a_plan_within_the_budget_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rewritten graph may need some bytes more than its limit: that is what is spared."""
    model, ids, target = llama(SIZE, torch.device("cpu"))
    joint, outputs = joint_graph(model, ids, target)

    def peak_of(budget: Any) -> tuple[int, float]:
        options = Options(memory_budget=budget)
        outcome = pipeline.run(joint, options, num_fwd_outputs=outputs).outcome
        assert outcome.peak_bytes is not None and outcome.extra_time is not None
        return outcome.peak_bytes, outcome.extra_time

    free_bytes, free_time = peak_of("free")
    exactly = math.ceil(MEASURED_OVER_SIMULATED * free_bytes) + 1
    assert peak_of(exactly) == (free_bytes, free_time)
    simulate = stages.simulate_step

    def a_bit_more(*graphs: Any) -> StepMemory:
        memory = simulate(*graphs)
        moments = (*memory.forward.moments, Moment("more", memory.peak_bytes + 4096))
        return dataclasses.replace(
            memory, forward=dataclasses.replace(memory.forward, moments=moments)
        )

    monkeypatch.setattr(stages, "simulate_step", a_bit_more)
    assert peak_of(exactly) == (free_bytes + 4096, free_time)


def test_a_budget_that_cannot_be_met_names_the_lowest_peak() -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    strict = compiled(lambda ids, target: model(ids, target), memory_budget="1MiB")
    with pytest.raises(
        Exception, match=r"memory_budget=1\.0 MiB cannot be met: the lowest peak found is \d+"
    ) as e:
        strict(ids, target)
    assert MstpassError.__name__ in str(e.value) or isinstance(e.value.__cause__, MstpassError)
    torch._dynamo.reset()
    lax = compiled(lambda ids, target: model(ids, target), memory_budget="1MiB", strict=False)
    with pytest.warns(UserWarning, match="In memory there"):
        lax(ids, target).backward()
    report = mstpass.reports()[-1]
    joint, outputs = joint_graph(lambda ids, target: model(ids, target), ids, target)
    least = pipeline.run(joint, Options(memory_budget=0.0), num_fwd_outputs=outputs).outcome
    assert report.outcome.peak_bytes == pytest.approx(least.peak_bytes, rel=0.01)
    assert any("lowest peak" in note for note in report.outcome.notes)


def test_a_budget_between_costs_a_time_between() -> None:
    """All that the least memory saves here are loops' results: no checkpoint is chosen besides."""
    problem = _problem(LlamaSize(64, 6, 2, 192, 256, 8192))
    free, least = (peak_search(problem, budget) for budget in (None, 0))
    highest, lowest = (memory_of(problem, plan).peak_bytes for plan in (free, least))
    shortest, longest = (_us(problem, plan) for plan in (free, least))
    for share in (0.3, 0.6):
        budget = int(lowest + share * (highest - lowest))
        plan = peak_search(problem, budget)
        assert memory_of(problem, plan).peak_bytes <= budget
        assert shortest <= _us(problem, plan) <= longest - 0.2 * (longest - shortest)


def _us(problem: CutProblem, plan: Plan) -> float:
    return simulate_plan(problem, plan).us


# ---- loops in the place of their members -------------------------------------------------------
def _chain() -> CutProblem:
    """x -> wide -> out, and gradients back."""
    values = (
        Value("x", 8, kind="input", free=True),
        Value("wide", 64, ("x",), "call", us=4.0),
        Value("out", 8, ("wide",), "call", us=4.0),
    )
    backward = (
        Value("tangent", 8, kind="input"),
        Value("dwide", 64, ("tangent", "wide"), "call", us=4.0),
        Value("dx", 8, ("dwide",), "call", us=4.0),
    )
    loops = (
        Loop("loop:out", ("wide", "out"), ("x",), (Result("out", 8),), 16, 8.0),
        Loop("loop:dx", ("wide", "dwide", "dx"), ("x", "tangent"), (Result("dx", 8),), 32, 12.0),
    )
    modes = RegionModes("wide", (Mode("recompute", loops), Mode("whole")))
    return CutProblem(
        values, backward=backward, outputs=("out",), gradients=("dx",), regions=(modes,)
    )


def test_loops_take_the_place_of_their_members() -> None:
    problem = _chain()
    whole = with_modes(problem, {"wide": "whole"})
    assert [v.name for v in whole.values] == ["x", "wide", "out"]
    assert step_memory(whole, {"wide"}).peak_bytes == 64 + 8 + 64 + 8  # the caller holds "out"
    chunked = with_modes(problem, {})
    assert [v.name for v in chunked.values] == ["x", "loop:out", "out"]
    assert [v.name for v in chunked.backward] == ["tangent", "loop:dx", "dx"]
    assert not any(v.needed for v in chunked.values if not v.free)
    assert step_memory(chunked, frozenset()).peak_bytes == 8 + 8 + 32 + 8
    assert step_us(chunked, frozenset()) == 20.0 and step_us(whole, {"wide"}) == 16.0


def test_what_the_caller_holds_is_there_all_through_the_backward() -> None:
    """An output that also crosses is not freed after its last use; one that does not, counts."""
    chain = dataclasses.replace(_chain(), regions=(), outputs=("wide",))
    ends = [m.bytes for m in step_memory(chain, {"wide"}).backward.moments]
    assert ends == [8 + 64 + 64, 64 + 64 + 8]
    freed = dataclasses.replace(_chain(), regions=())
    ends = [m.bytes for m in step_memory(freed, {"wide"}).backward.moments]
    assert ends == [8 + 64 + 64 + 8, 64 + 8 + 8]


def test_loops_that_need_each_other_are_no_plan() -> None:
    problem = _chain()
    one = Loop("loop:out", ("out",), ("dx",), (Result("out", 8),), 1, 1.0)
    two = Loop("loop:dx", ("dx",), ("out",), (Result("dx", 8),), 1, 1.0)
    circle = dataclasses.replace(problem, regions=(RegionModes("r", (Mode("save", (one, two)),)),))
    with pytest.raises(Cycle, match="needs its own results"):
        with_modes(circle, {})


def test_a_region_knows_its_modes() -> None:
    with pytest.raises(KeyError, match="no mode 'fused', only recompute, whole"):
        with_modes(_chain(), {"wide": "fused"})
    with pytest.raises(ValueError, match="different names"):
        RegionModes("r", (Mode("save"), Mode("save")))


# ---- what a CUDA device has left ---------------------------------------------------------------
def test_auto_on_cuda_is_what_is_free_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    parameter = torch.nn.Parameter(torch.zeros(gib // 8, device="meta"))

    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)

    inputs = [torch.zeros(1).as_subclass(OnCuda), parameter]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * gib)
    monkeypatch.setattr(device_budget, "_optimizers_that_stepped", set())
    budget = lambda **given: (
        device_budget.with_device_budget(Options(**given), inputs).memory_budget
    )
    assert budget() == 11 * gib  # 10 free + 2 cached - 1 for the states to come
    assert budget(reserve="4GiB") == 8 * gib
    assert budget(memory_budget="free") == "free"
    assert budget(reserve=2**40) == 1, "nothing left: the least memory, with a warning"
    device_budget._optimizers_that_stepped.add("Adam")
    assert budget() == 12 * gib
    on_cpu = device_budget.with_device_budget(Options(), [torch.zeros(1), parameter])
    assert on_cpu.memory_budget == "auto"


def test_an_optimizers_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_budget, "_optimizers_that_stepped", set())
    device_budget.watch_optimizers()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    assert device_budget._optimizers_that_stepped == {"SGD"}
