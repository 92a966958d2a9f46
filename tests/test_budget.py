"""Memory budgets: the measured peak is within them, or the user learns the lowest peak found."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass import pipeline
from mstpass.backend import MstpassError
from mstpass.bench.models import LlamaSize, llama
from mstpass.limit import MEASURED_OVER_SIMULATED, Limit
from mstpass.measure import peak_bytes
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_ops import Moment, StepMemory
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.options import Options
from mstpass.partition.solve import solve
from mstpass.partition.solvers import SOLVERS
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.problem import CutProblem, Plan
from tests.checks import check_against_float64, compiled, joint_graph

pytestmark = [pytest.mark.sampled(1), pytest.mark.op_by_op]

SIZE = LlamaSize(128, 4, 4, 352, 6000, 1024)
ONE_LAYER = dataclasses.replace(SIZE, layers=1)
SMALL_HEAD = LlamaSize(128, 3, 4, 512, 300, 1024)
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
    """Compared without cheap values that are computed twice."""
    monkeypatch.setattr(StepSimulation, "lowered_program", StepSimulation.program)
    model, ids, target = llama(SIZE, torch.device("cpu"))
    model = model.to(dtype)
    joint, outputs = joint_graph(lambda ids, target: model(ids, target), ids, target)
    options = Options(memory_budget=budget, reconstruct="off")
    result = pipeline.run(joint, options, num_fwd_outputs=outputs)
    assert result.problem is not None and result.modules is not None
    limit = Limit.of(options)
    forward, backward = (module.graph for module in result.modules)
    real = simulate_step(forward, backward, scatters_delayed=not limit.is_free)
    plan, *_ = solve(result.problem, options, limit, "")
    planned = simulate_plan(result.problem, plan).memory
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
    plan, *_ = solve(result.problem, options, Limit.of(options), "")
    planned = simulate_plan(result.problem, plan).memory
    assert [region.mode for region in result.outcome.regions] == ["fused"]
    assert planned.forward.peak.bytes == pytest.approx(real.forward.peak.bytes, rel=0.001)


@pytest.mark.parametrize("size", [pytest.param(SIZE, marks=pytest.mark.full), SMALL_HEAD])
def test_less_budget_never_means_more_peak_nor_less_time(size: LlamaSize) -> None:
    problem = _problem(size)
    solve = SOLVERS["peak_search"]
    free = simulate_plan(problem, solve(problem, None)).peak_bytes
    least = simulate_plan(problem, solve(problem, 0)).lowered_peak_bytes
    assert least < 0.6 * free
    peaks, times = [], []
    for budget in range(least, free, (free - least) // 6):
        plan = solve(problem, budget)
        step = simulate_plan(problem, plan)
        within = step.peak_bytes <= budget
        peaks.append(step.peak_bytes if within else step.lowered_peak_bytes)
        times.append(step.us)
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks)
    assert len(set(peaks)) >= 4, "the budgets have few different plans"
    assert times[0] > times[-1]


@pytest.mark.full  # test_inductor_schedule.py holds measured peaks to budgets in bytes in each run
@pytest.mark.parametrize(
    ("size", "share"), [(ONE_LAYER, 0.15), (SIZE, 0.15), (SIZE, 0.6), (SMALL_HEAD, 0.3)]
)
def test_the_measured_peak_stays_within_a_budget_in_bytes(size: LlamaSize, share: float) -> None:
    problem = _problem(size)
    solve = SOLVERS["peak_search"]
    free, least = (simulate_plan(problem, solve(problem, b)).peak_bytes for b in (None, 0))
    budget = int(_ABOVE * (least + share * (free - least)))
    model, ids, target = llama(size, torch.device("cpu"))
    step = compiled(lambda ids, target: model(ids, target), memory_budget=budget)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        step(ids, target).backward()

    run()
    model.zero_grad(set_to_none=True)
    measured, report = peak_bytes(run), mstpass.reports()[-1]
    assert measured <= budget and report.peak_bytes == pytest.approx(measured, rel=0.05)
    assert report.peak_bytes is not None and report.baseline_peak_bytes is not None
    assert report.peak_bytes <= budget < report.baseline_peak_bytes
    assert report.extra_time is not None and 0 < report.extra_time < 1


@pytest.mark.full
@pytest.mark.parametrize("budget", [0.5, 0.2])
def test_gradients_are_right_between_the_ends(budget: float) -> None:
    model, ids, target = llama(SIZE, torch.device("cpu"))
    report = check_against_float64(
        model, lambda m: lambda ids, target: m(ids, target), [ids, target], memory_budget=budget
    )
    assert report.outcome.save_plan is not None
    assert report.outcome.save_plan.solver == "peak_search"


def test_a_plan_within_the_budget_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten graphs may need some bytes more than the limit, which leaves room for that."""
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
    simulate = pipeline.simulate_step

    def a_bit_more(*graphs: Any) -> StepMemory:
        memory = simulate(*graphs)
        moments = (*memory.forward.moments, Moment("more", memory.peak_bytes + 4096))
        return dataclasses.replace(
            memory, forward=dataclasses.replace(memory.forward, moments=moments)
        )

    monkeypatch.setattr(pipeline, "simulate_step", a_bit_more)
    assert peak_of(exactly) == (free_bytes + 4096, free_time)


@pytest.mark.full
def test_a_budget_that_cannot_be_met_names_the_lowest_peak() -> None:
    model, ids, target = llama(ONE_LAYER, torch.device("cpu"))
    strict = compiled(lambda ids, target: model(ids, target), memory_budget="1MiB")
    with pytest.raises(
        Exception, match=r"memory_budget=1\.0 MiB cannot be met: the lowest peak found is \d+"
    ) as e:
        strict(ids, target)
    assert MstpassError.__name__ in str(e.value) or isinstance(e.value.__cause__, MstpassError)
    torch.compiler.reset()
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
    problem = _problem(LlamaSize(64, 2, 2, 192, 256, 8192))
    free, least = (peak_search(problem, budget) for budget in (None, 0))
    highest, lowest = (simulate_plan(problem, plan).peak_bytes for plan in (free, least))
    shortest, longest = (_us(problem, plan) for plan in (free, least))
    for share in (0.3, 0.6):
        budget = int(lowest + share * (highest - lowest))
        plan = peak_search(problem, budget)
        assert simulate_plan(problem, plan).lowered_peak_bytes <= budget
        assert shortest <= _us(problem, plan) <= longest - 0.2 * (longest - shortest)


def _us(problem: CutProblem, plan: Plan) -> float:
    return simulate_plan(problem, plan).us
