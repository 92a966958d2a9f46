"""`mstpass plan`: a shallow copy whose layers are repeated is the whole model, but for names."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mstpass.memory.simulate_plan import simulate_plan
from mstpass.planner.training import Training
from mstpass.problem.problem import CutProblem, Loop, LoopResult, Mode, Plan, RegionModes, Value
from mstpass.problem.saved_set import saved_where

pytest.importorskip("transformers")
pytest.importorskip("rich")

from mstpass.planner import compiled_rows
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.deepen import CannotDeepen, deepened, same_plan
from mstpass.planner.longest_sequence import TOLERANCE
from mstpass.planner.models import config_of
from mstpass.planner.progress import silent
from mstpass.planner.request import Request
from mstpass.planner.room import Room
from mstpass.planner.traced_step import trace
from mstpass.problem.apply_modes import with_modes
from tests.planner_models import TINY, plan_sizes

MIB = 2**20
FEW, DEPTH = 4, 8
DEEP = {**TINY, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": DEPTH}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * (DEPTH // 2)}
ALIKE = {
    "llama": DEEP,
    "qwen3": {**DEEP, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "experts": {
        **DEEP,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
UNLIKE = {
    "windows alternate": {
        **DEEP,
        **WINDOWS,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 64,
    },
}


@pytest.fixture
def config_at(tmp_path):
    def written(values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    return written


def _traced(path, layers):
    return trace(config_of(path), Training(), 2048, ("free", 0.0), 512, layers)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")  # of transformers' experts
@pytest.mark.parametrize("model", ALIKE)
def test_a_deepened_copy_is_the_whole_model(config_at, model):
    path = config_at(ALIKE[model])
    deep, whole = deepened(_traced(path, FEW), FEW, DEPTH), _traced(path, None)
    assert deep.problems.keys() == whole.problems.keys()
    for budget, problem in deep.problems.items():
        modes = {region.region: region.modes[-1].name for region in problem.regions}
        saved = saved_where(with_modes(problem, modes), lambda value: value.bytes > 2**16)
        plan, other = Plan(saved, modes), whole.problems[budget]
        same = same_plan(plan, problem, other)
        assert same is not None and len(same.saved) == len(saved)
        step, same_step = simulate_plan(problem, plan), simulate_plan(other, same)
        assert (step.peak_bytes, step.us) == (same_step.peak_bytes, pytest.approx(same_step.us))


def test_the_same_plan_has_the_same_rows_on_the_host():
    def problem(name):
        loop = Loop(f"loop:{name}", (name,), ("x",), (LoopResult(name, 8),), 0, 1.0)
        region = RegionModes(
            name, (Mode("rows", (dataclasses.replace(loop, in_rows=((name, 4),)),)),)
        )
        return CutProblem((Value(name, 8),), regions=(region,))

    names = frozenset({"a"}), frozenset({"b"})
    one, other = (Plan(n, offloaded=n, by_chunk=n) for n in names)
    assert same_plan(one, problem("a"), problem("b")) == other


def test_a_problem_that_differs_has_no_plan(config_at):
    problem = _traced(config_at(DEEP), FEW).problems[0.0]
    plan = Plan(frozenset())
    assert same_plan(plan, problem, problem) == plan
    *values, last = problem.values
    larger = dataclasses.replace(last, bytes=last.bytes + 1)
    other = dataclasses.replace(problem, values=(*values, larger))
    assert same_plan(plan, problem, other) is None
    assert same_plan(plan, problem, dataclasses.replace(problem, regions=())) is None


@pytest.mark.parametrize("model", UNLIKE)
def test_layers_that_differ_are_not_repeated(config_at, model):
    with pytest.raises(CannotDeepen):
        deepened(_traced(config_at(UNLIKE[model]), FEW), FEW, DEPTH)


def _rows(path, length=None):
    request = Request(path, Training(optimizer="sgd"), 64 * MIB, 0, alone=True, length=length)
    return CompiledRows(Room(request, plan_sizes(path)), config_of(path), silent)


def _without_copies(monkeypatch):
    monkeypatch.setattr(compiled_rows, "_REPEATED", DEPTH)  # too many for this model


@pytest.mark.parametrize("length", [2048, 16384])  # a budget in bytes, and the least memory
def test_a_row_is_that_of_the_whole_model(config_at, monkeypatch, length):
    rows = _rows(config_at(DEEP), length)
    layers = []
    monkeypatch.setattr(compiled_rows, "trace", lambda *a: (layers.append(a[5]), trace(*a))[1])
    row = rows.mst_row()
    assert layers == [FEW, None]
    _without_copies(monkeypatch)
    other = _rows(rows.request.model, length).mst_row()
    assert row.parts == other.parts and row.memory_budget == other.memory_budget
    assert (row.us, row.extra_time) == pytest.approx((other.us, other.extra_time))


def test_a_copy_that_is_not_the_whole_model_is_found_out(config_at, monkeypatch):
    """Then the whole model is traced and planned as if there was no copy."""
    path = config_at(DEEP)
    monkeypatch.setattr(compiled_rows, "deepened", lambda traced, few, depth: traced)
    row = _rows(path, 2048).mst_row()
    _without_copies(monkeypatch)
    other = _rows(path, 2048).mst_row()
    assert (row.parts, row.memory_budget) == (other.parts, other.memory_budget)


@pytest.mark.full
def test_the_longest_row_is_as_long_as_by_whole_models(config_at, monkeypatch):
    rows = _rows(config_at(DEEP))
    row = rows.mst_row()
    _without_copies(monkeypatch)
    other = _rows(rows.request.model).mst_row()
    assert row.fits and other.fits and row.length >= (1 - 5 * TOLERANCE) * other.length
