"""No plan's loops raise the simulated peak above that of the step without loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from mstpass import fewer_loops, pipeline
from mstpass.bench import problems
from mstpass.bench.models import LlamaSize, llama
from mstpass.options import Options
from mstpass.partition.solvers import SOLVERS
from mstpass.partition.solvers.candidate import TIE, Candidate, without_loops
from mstpass.partition.solvers.free_plan import free_plan, loops_that_help
from mstpass.partition.solvers.min_cut import certain_bytes
from mstpass.plans import Outcome
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import CALL, INPUT
from mstpass.problem.problem import CutProblem, Loop, LoopResult, Mode, Plan, RegionModes, Value
from mstpass.problem.saved_set import saved_where
from mstpass.problem.solver_registry import OWN_SOLVERS, registered
from mstpass.tracing.joint_graphs import trace_joint
from tests.checks import examples, joint_graph
from tests.problems import steps
from tests.test_solvers import EXAMPLES

pytestmark = pytest.mark.sampled(8)

FEWER = settings(EXAMPLES, max_examples=examples(100))

MODES = st.randoms(use_true_random=False)


def _optional(problem: CutProblem) -> CutProblem:
    """The problem in which each region may stay whole."""
    regions = (
        region
        if any(not mode.loops for mode in region.modes)
        else dataclasses.replace(region, modes=(*region.modes, Mode("whole")))
        for region in problem.regions
    )
    return dataclasses.replace(problem, regions=tuple(regions))


# ---- on plain data -------------------------------------------------------------------------------
@given(problem=steps(forward=12, backward=12, regions=3).map(_optional))
@FEWER
def test_the_free_plan_is_never_above_the_step_without_loops(problem: CutProblem) -> None:
    assert free_plan(problem).peak_bytes <= without_loops(problem).peak_bytes


@given(problem=steps(forward=12, backward=12, regions=3).map(_optional), random=MODES)
@FEWER
def test_any_plan_is_brought_below_the_step_without_loops(problem: CutProblem, random: Any) -> None:
    modes = {region.region: random.choice(region.modes).name for region in problem.regions}
    closed = with_modes(problem, modes)
    saved = saved_where(closed, lambda value: random.random() < 0.5)
    found = Candidate(closed, Plan(saved, modes))
    fewer = loops_that_help(problem, found)
    assert fewer.peak_bytes <= without_loops(problem).peak_bytes
    assert fewer is found or found.peak_bytes > fewer.peak_bytes


@given(problem=steps(forward=12, backward=12))
@FEWER
def test_what_is_certain_is_no_more_than_the_peak(problem: CutProblem) -> None:
    live = {*problem.outputs, *problem.gradients}
    for value in reversed((*problem.values, *problem.backward)):
        live.update(value.inputs if value.name in live else ())
    values, backward = (
        tuple(value for value in part if value.name in live)
        for part in (problem.values, problem.backward)
    )
    problem = dataclasses.replace(problem, values=values, backward=backward, regions=())
    certain = certain_bytes(problem).values()
    assert max(certain, default=0) <= without_loops(problem).peak_bytes


@pytest.mark.parametrize("name", ["mlps-2", "head", "llama-1-small", "llama-8", "t5-6", "gpt2-12"])
def test_recorded_problems(name: str) -> None:
    problem = problems.load(name)
    limit = without_loops(problem).peak_bytes
    assert free_plan(problem).peak_bytes <= limit
    for solver in ("min_cut", "greedy", "save_all", "recompute_all"):
        plan = SOLVERS[solver](problem, None)
        found = Candidate(with_modes(problem, plan.modes), plan)
        assert loops_that_help(problem, found).peak_bytes <= limit, solver


def test_only_the_loops_that_raise_the_peak_are_given_up() -> None:
    inner_bytes = {"r0": 10, "r1": 10, "r2": 300, "r3": 10}
    values = [Value("x0", 1, kind=INPUT, free=True)]
    regions = []
    for i, (name, size) in enumerate(inner_bytes.items()):
        wide, narrow = f"wide{i}", f"x{i + 1}"
        values += [Value(wide, 100, (f"x{i}",), CALL), Value(narrow, 1, (wide,), CALL)]
        loop = Loop(
            f"mst_loop_{narrow}", (wide, narrow), (f"x{i}",), (LoopResult(narrow, 1),), size, 1.0
        )
        regions.append(RegionModes(name, (Mode("recompute", (loop,)), Mode("whole"))))
    problem = CutProblem(tuple(values), outputs=("x4",), regions=tuple(regions))
    found = Candidate(with_modes(problem, {}), Plan(frozenset()))
    fewer = loops_that_help(problem, found)
    assert [fewer.plan.modes[name] for name in inner_bytes] == 2 * ["recompute"] + [
        "whole",
        "recompute",
    ]


# ---- the pipeline --------------------------------------------------------------------------------
Joint = tuple[fx.GraphModule, int]


def _loss(h_ND: torch.Tensor, w_VD: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((h_ND @ w_VD.t()).float(), y_N)


@pytest.fixture(scope="module")
def head() -> Joint:
    """A head whose sums over chunks, in float32, are as large as its logits in bfloat16."""
    h_ND, w_VD = (
        torch.empty(rows, 2048, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for rows in (2048, 128_256)
    )
    y_N = torch.empty(2048, device="meta", dtype=torch.long)
    return trace_joint(_loss, (h_ND, w_VD, y_N), lambda module, outputs: (module, outputs))


def _planned(joint: Joint, stop_after: str = "split", **given: Any) -> Outcome:
    module, outputs = joint
    options = Options(**given)
    return pipeline.run(module, options, num_fwd_outputs=outputs, stop_after=stop_after).outcome


@pytest.mark.parametrize("solver", ["auto", *OWN_SOLVERS])
@pytest.mark.parametrize("memory_budget", ["free", 0.0, "2GiB"])
def test_no_solver_s_loops_raise_the_peak(
    head: Joint, solver: str, memory_budget: str | float
) -> None:
    outcome = _planned(head, solver=solver, memory_budget=memory_budget)
    assert outcome.peak_bytes is not None and outcome.baseline_peak_bytes is not None
    assert not outcome.regions or outcome.peak_bytes <= outcome.baseline_peak_bytes


def test_a_registered_solver_keeps_the_loops_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it saves raises the peak, and a loop that it has does not."""

    def hoard(problem: CutProblem, budget_bytes: int | None) -> Plan:
        modes = {region.region: "whole" for region in problem.regions[:-1]}
        closed = with_modes(problem, modes)
        return Plan(saved_where(closed, lambda value: value.forward), modes)

    monkeypatch.setitem(registered, "hoard", hoard)
    model, ids, target = llama(LlamaSize(256, 2, 4, 2048, 4000, 2048), torch.device("meta"))
    joint = trace_joint(model, (ids, target), lambda module, outputs: (module, outputs))
    of_solver = _planned(joint, stop_after="plan", solver="hoard")
    outcome = _planned(joint, solver="hoard")
    assert outcome.peak_bytes is not None and outcome.baseline_peak_bytes is not None
    assert outcome.peak_bytes <= outcome.baseline_peak_bytes
    assert outcome.regions == of_solver.regions != ()


@pytest.mark.parametrize("chunk_tokens", [128, 256, 1000])
def test_a_given_length_asks_for_no_loop_that_raises_the_peak(
    head: Joint, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fewer_loops, "FORCED_MAY_RAISE", TIE)  # as outside of the tests
    outcome = _planned(head, chunk_tokens=chunk_tokens)
    assert outcome.peak_bytes == outcome.baseline_peak_bytes and not outcome.regions
    (rejection,) = outcome.rejections
    assert "would raise the step's peak" in rejection.reason and rejection.fix


def test_a_varying_length_keeps_its_loops() -> None:
    """They raise the peak of the batch that was traced, and lower that of longer ones."""
    h_ND, w_VD = (torch.zeros(n, 1024, dtype=torch.bfloat16) for n in (1000, 2048))
    y_N = torch.zeros(1000, dtype=torch.long)
    torch._dynamo.mark_dynamic(h_ND, 0)
    torch._dynamo.mark_dynamic(y_N, 0)
    outcome = _planned(joint_graph(_loss, h_ND, w_VD.requires_grad_(), y_N))
    assert outcome.peak_bytes is not None and outcome.baseline_peak_bytes is not None
    assert outcome.peak_bytes > outcome.baseline_peak_bytes
    assert [region.mode for region in outcome.regions] == ["fused"]
