"""Two and three levels of checkpoints: passes that keep one value, recomputation that keeps all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx, nn

import mstpass
from mstpass import pipeline
from mstpass.bench.models import Llama, LlamaSize
from mstpass.graph.node_meta import copy_name, original_name
from mstpass.measure import peak_bytes
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.options import Options
from mstpass.partition.solvers.checkpoint_plans import CheckpointPlans, checkpoint_plans
from mstpass.partition.solvers.checkpoints import ForwardPlaces, checkpoints
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem import solver_registry
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.names import is_loop
from mstpass.problem.problem import SAVE, CutProblem, Plan
from mstpass.problem.saved_set import read_by_backward, recomputed
from tests.checks import check_against_float64, compiled, joint_graph
from tests.models import MLPS, Attention, Block
from tests.problems import residual_stream

pytestmark = [pytest.mark.sampled(2), pytest.mark.op_by_op]


def _plans(problem: CutProblem) -> CheckpointPlans:
    found = checkpoint_plans(problem)
    assert found is not None
    return found


def test_the_peak_grows_with_the_root_of_the_blocks() -> None:
    problem = residual_stream(blocks=64, inner=8)
    flat, nested = checkpoints(problem), _plans(problem).least
    assert nested is not None
    assert nested.peak_bytes < 0.6 * flat.simulation.peak_bytes
    assert len(nested.plan.saved) < 16 < len(nested.plan.nested)


def test_more_levels_lower_the_peak_of_many_blocks() -> None:
    plans = _plans(residual_stream(blocks=64, inner=4))
    two = plans.lowest(levels=1)
    three = plans.lowest(levels=2)
    assert two is not None and three is not None
    assert three.peak_bytes < 0.9 * two.peak_bytes
    assert set(two.plan.nested.values()) == {1} and set(three.plan.nested.values()) == {1, 2}


def test_few_blocks_have_two_levels() -> None:
    plan = peak_search(residual_stream(blocks=6, inner=8), 0)
    assert set(plan.nested.values()) == {1}


def test_one_block_is_not_nested() -> None:
    assert not peak_search(residual_stream(blocks=1, inner=8), 0).nested


def test_a_pass_keeps_only_the_nested_value() -> None:
    problem = residual_stream(blocks=4, inner=3)
    ops = StepSimulation(problem, frozenset({"x0"}), {"x2": 1}).program.backward
    names = [op.name for op in ops]
    assert len(set(names)) == len(names)
    known: set[str] = set()
    for op in ops:
        assert known.issuperset(op.inputs), op
        known.add(op.name)
    # The last two blocks are recomputed after the pass, the first two when gradients need them.
    assert names.index("x1:for:x2") < names.index("x2") < names.index("x3") < names.index("g_x4")
    assert names.index("g_x2") < names.index("x1") < names.index("g_x1")
    assert not any("x1" in op.inputs for op in ops if op.name.startswith("x2"))


def test_a_value_of_the_second_level_is_computed_on_the_way_and_once_more() -> None:
    problem = residual_stream(blocks=6, inner=3)
    nested = {"x2": 2, "x4": 1}
    ops = StepSimulation(problem, frozenset({"x0"}), nested).program.backward
    names = [op.name for op in ops]
    assert len(set(names)) == len(names)
    known: set[str] = set()
    for op in ops:
        assert known.issuperset(op.inputs), op
        known.add(op.name)
    assert names.index("x2:for:x4") < names.index("x4") < names.index("g_x5")
    assert names.index("g_x4") < names.index("x1:for:x2") < names.index("x2") < names.index("g_x3")
    assert names.index("g_x2") < names.index("x1") < names.index("g_x1")
    assert not any("x2" in op.inputs for op in ops if op.name.endswith(":for:x4"))


@pytest.mark.parametrize("blocks", [9, 16])
def test_the_graphs_have_the_simulated_peak(blocks: int) -> None:
    """The problem and the modules have the same order of ops and the same peak."""
    model = nn.Sequential(*(Block(16, MLPS["gelu"](16)) for _ in range(blocks)))
    x = torch.randn(1, 4096, 16, requires_grad=True)
    joint, outputs = joint_graph(lambda x: model(x).sin().sum(), x)
    options = Options(chunk="off", memory_budget=0.0, reconstruct="off")
    result = pipeline.run(joint, options, num_fwd_outputs=outputs)
    assert result.problem is not None and result.modules is not None
    plan = peak_search(result.problem, 0)
    assert plan.nested
    made = result.outcome.save_plan
    assert made is not None
    assert dict(zip(made.nested, made.levels, strict=True)) == plan.nested
    assert set(made.inner) == {name for name, level in plan.nested.items() if level > 1}
    forward, backward = result.modules
    peak = simulate_step(forward.graph, backward.graph, scatters_delayed=True).peak_bytes
    assert peak <= 1.01 * simulate_plan(result.problem, plan).peak_bytes
    flat = checkpoints(result.problem.allowing(True))
    assert peak < 0.9 * simulate_plan(result.problem, flat.plan).peak_bytes


def test_a_lower_budget_never_has_a_higher_peak() -> None:
    stream = residual_stream(blocks=16, inner=4)
    timed = tuple(dataclasses.replace(value, us=1.0) for value in stream.values)
    problem = dataclasses.replace(stream, values=timed, recompute_heavy=False)
    free, least = (simulate_plan(problem, peak_search(problem, b)).peak_bytes for b in (None, 0))
    peaks = []
    for budget in range(least, free, max(1, (free - least) // 12)):
        plan = peak_search(problem, budget)
        peaks.append(simulate_plan(problem, plan).peak_bytes)
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks) and len(set(peaks)) > 6


def test_reports_know_the_nodes_that_a_pass_copies() -> None:
    model = nn.Sequential(*(Block(16, MLPS["gelu"](16)) for _ in range(9)))
    x = torch.randn(1, 4096, 16, requires_grad=True)
    options = {"chunk": "off", "memory_budget": 0.0}
    report = mstpass.explain(lambda x: model(x).sin().sum(), x, options=options)
    assert report.outcome.save_plan is not None and report.outcome.save_plan.nested
    assert report.details is not None and report.details.after is not None
    known = {node.name for node in report.details.nodes}
    assert {life.node for life in report.details.after.lives} <= known


@pytest.mark.parametrize("name", ["mm_37", "_to_copy_1", "copy_", "add__copy_2_3"])
def test_the_name_of_a_copy_tells_its_original(name: str) -> None:
    node = fx.Graph().create_node("call_function", torch.sin, name=copy_name(name))
    for number in ("", "_1", "_12"):
        assert original_name(f"{node.name}{number}") == name
    assert original_name(copy_name(copy_name(name))) == original_name(name) == name
    assert copy_name(copy_name(name)) == copy_name(name)


class _Dropping(nn.Module):
    """Attention blocks, each followed by dropout; masks are drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, Attention(16, 2)) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1)
        return x.sin().sum()


@pytest.mark.parametrize(
    ("dynamic", "layers"), [(False, 6), pytest.param(True, 9, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_gradients_under_inductor(dynamic: bool, layers: int) -> None:
    """Blocks with loops run three times; their gradients stay right."""
    torch.compiler.reset()
    torch.manual_seed(0)
    size = LlamaSize(layers=layers, width=32, heads=2, mlp_width=96, vocabulary=64, length=1536)
    model = Llama(size)
    ids, target = torch.randint(size.vocabulary, (2, 1, size.length))
    for given in (ids, target) if dynamic else ():
        torch._dynamo.mark_dynamic(given, 1)
    options = {"memory_budget": 0.0, "chunk_tokens": 512}
    step = lambda model: lambda ids, target: model(ids, target)
    report = check_against_float64(model, step, (ids, target), **options)
    save_plan = report.outcome.save_plan
    assert save_plan is not None and save_plan.nested
    assert any(region.kind == "mlp" for region in report.regions)


def _three_levels(problem: CutProblem, _: int | None) -> Plan:
    """A solver: the lowest peak with three levels of nested checkpoints."""
    found = _plans(problem).lowest(levels=3)
    assert found is not None
    return found.plan


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients_with_more_levels(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    monkeypatch.setitem(solver_registry.registered, "three_levels", _three_levels)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16, MLPS["gelu"](16)) for _ in range(14)))
    x = torch.randn(1, 4096, 16, requires_grad=True)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    step = lambda model: lambda x: model(x).square().mean()
    options = {"memory_budget": 0.0, "chunk": "off", "solver": "three_levels"}
    report = check_against_float64(model, step, (x,), **options)
    made = report.outcome.save_plan
    assert made is not None and set(made.levels) == {1, 2, 3}


def _attention_kept(problem: CutProblem, _: int | None) -> Plan:
    """A solver: checkpoints, and loops over heads whose results the backward computes and keeps."""
    modes = {
        region.region: mode.name
        for region in problem.regions
        for mode in region.modes
        if mode.kind == SAVE
    }
    closed = with_modes(problem, modes).allowing(recompute_heavy=True)
    line = ForwardPlaces(closed)
    kept = frozenset[str]().union(*map(line.names_at, line.spaced()[::3]))
    saved = read_by_backward(closed, complete(closed, kept))
    assert sum(map(is_loop, recomputed(closed, saved))) >= 2
    return Plan(saved, modes)


@pytest.mark.kernels
def test_gradients_where_a_loop_s_results_are_recomputed_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(solver_registry.registered, "attention_kept", _attention_kept)
    model = nn.Sequential(*(Attention(32, 4) for _ in range(3)))
    x = torch.randn(1, 1536, 32, requires_grad=True)
    _are_right_with_attention_kept(model, lambda model: lambda x: model(x).square().mean(), x)


def test_gradients_where_loops_of_symbolic_length_are_recomputed_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Besides loops of MLPs and a head."""
    monkeypatch.setitem(solver_registry.registered, "attention_kept", _attention_kept)
    size = LlamaSize(layers=3, width=32, heads=4, mlp_width=96, vocabulary=64, length=1536)
    ids, target = torch.randint(size.vocabulary, (2, 1, size.length))
    for given in (ids, target):
        torch._dynamo.mark_dynamic(given, 1)
    step = lambda model: lambda ids, target: model(ids, target)
    _are_right_with_attention_kept(Llama(size), step, ids, target)


def _are_right_with_attention_kept(model: nn.Module, step: Any, *inputs: torch.Tensor) -> None:
    options = {"memory_budget": 0.0, "solver": "attention_kept", "chunk_tokens": 512}
    report = check_against_float64(model, step, inputs, **options)
    attention = [region for region in report.regions if region.kind == "attention"]
    assert len(attention) == 3 and all(region.mode == "save" for region in attention)


class _Mlps(nn.Module):
    """MLP blocks with dropout on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, MLPS["gelu"](32)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1)
        return x.square().mean()


def _peaks(model: nn.Module, x: torch.Tensor) -> list[int]:
    """The peaks of the free and of the least-memory plan; their gradients must agree."""
    gradients: list[list[torch.Tensor]] = []
    peaks: list[int] = []
    for options in ({"memory_budget": "free"}, {"memory_budget": 0.0}):
        torch.compiler.reset()
        step: Any = compiled(model, **options)

        def run(step: Any = step) -> list[torch.Tensor]:
            model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            return list(torch.autograd.grad(step(x), [x, *model.parameters()]))

        gradients.append(run())
        peaks.append(peak_bytes(run))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return peaks


def test_dropout_keeps_its_masks_and_memory_falls() -> None:
    torch.manual_seed(0)
    free, least = _peaks(_Dropping().train(), torch.randn(1, 2048, 16, requires_grad=True))
    report = mstpass.reports()[-1]
    assert report.outcome.save_plan is not None and report.outcome.save_plan.nested
    assert least < 0.6 * free


@pytest.mark.full
def test_a_net_of_mlps_is_several_loops() -> None:
    """A single loop would take minutes to compile; loops that run again read packed masks."""
    torch.manual_seed(0)
    free, least = _peaks(_Mlps().train(), torch.randn(1, 2048, 32, requires_grad=True))
    regions = mstpass.reports()[-1].outcome.regions
    assert [region.mode for region in regions].count("recompute") >= 2
    assert {region.mode for region in regions} == {"recompute", "fused"}
    assert least < 0.6 * free
