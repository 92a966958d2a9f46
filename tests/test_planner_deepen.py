"""`mstpass plan`: a shallow copy whose layers are repeated is the whole model, but for names."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mstpass.planner.training import Training
from mstpass.problem.problem import CutProblem, Loop, LoopResult, Mode, RegionModes, Value

pytest.importorskip("transformers")
pytest.importorskip("rich")

from mstpass.planner import background, compiled_rows
from mstpass.planner.background import WholeModel
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.deepen import CannotDeepen, deepened, is_same
from mstpass.planner.lengths import TOLERANCE
from mstpass.planner.models import config_of, has_kinds_of_layers
from mstpass.planner.request import Request, Steps, silent
from mstpass.planner.room import Room
from mstpass.planner.traced_step import trace
from tests import planner_models
from tests.planner_models import TINY, plan_sizes

MIB = 2**20
FULL = pytest.mark.full
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
        assert is_same(problem, whole.problems[budget])


def test_problems_that_are_the_same_but_for_names():
    def problem(name, size=4):
        loop = Loop(f"loop:{name}", (name,), ("x",), (LoopResult(name, 8),), 0, 1.0)
        region = RegionModes(
            name, (Mode("rows", (dataclasses.replace(loop, in_rows=((name, size),)),)),)
        )
        return CutProblem((Value(name, 8),), regions=(region,))

    assert is_same(problem("a"), problem("b"))
    assert not is_same(problem("a"), problem("b", 8))


def test_problems_that_differ(config_at):
    problem = _traced(config_at(DEEP), FEW).problems[0.0]
    assert is_same(problem, problem)
    *values, last = problem.values
    larger = dataclasses.replace(last, bytes=last.bytes + 1)
    assert not is_same(problem, dataclasses.replace(problem, values=(*values, larger)))
    assert not is_same(problem, dataclasses.replace(problem, regions=()))


@pytest.mark.parametrize("model", UNLIKE)
def test_layers_that_differ_are_not_repeated(config_at, model):
    with pytest.raises(CannotDeepen):
        deepened(_traced(config_at(UNLIKE[model]), FEW), FEW, DEPTH)


def _rows(path, length=None):
    request = Request(path, Training(optimizer="sgd"), 64 * MIB, 0, alone=True, length=length)
    return CompiledRows(Room(request, plan_sizes(path)), config_of(path), silent)


def _without_copies(monkeypatch):
    monkeypatch.setattr(compiled_rows, "_REPEATED", DEPTH)  # too many for this model


@pytest.mark.parametrize(
    "length", [2048, pytest.param(16384, marks=FULL)]
)  # a budget in bytes, and the least memory
def test_a_row_is_that_of_the_whole_model(config_at, monkeypatch, length):
    rows = _rows(config_at(DEEP), length)
    layers = []
    for module in (compiled_rows, background):
        monkeypatch.setattr(module, "trace", lambda *a: (layers.append(a[5]), trace(*a))[1])
    row = rows.mst_row()
    assert layers == [FEW, None]
    _without_copies(monkeypatch)
    other = _rows(rows.request.model, length).mst_row()
    assert row.parts == other.parts and row.memory_budget == other.memory_budget
    assert (row.us, row.extra_time) == pytest.approx((other.us, other.extra_time))


def test_a_copy_that_is_not_the_whole_model_is_found_out(config_at):
    path = config_at(DEEP)
    copy, room = _traced(path, FEW), _rows(path).room
    with WholeModel(room, 2048, 512, 1, silent) as whole:
        assert not whole.is_like(copy)
        assert whole.is_like(deepened(copy, FEW, DEPTH))


def test_then_the_copy_has_no_row(config_at, monkeypatch):
    rows = _rows(config_at(DEEP), 2048)
    monkeypatch.setattr(rows, "_row_of_copy", lambda steps: "the copy's")
    monkeypatch.setattr(rows, "_copy", "its trace")
    for is_like, row in ((True, "the copy's"), (False, None)):
        monkeypatch.setattr(WholeModel, "is_like", lambda self, copy, found=is_like: found)
        assert rows._deepened_row(Steps(silent, "", 1)) == row


def test_layers_of_several_kinds_have_no_copy(config_at, monkeypatch):
    """They may differ at some lengths only, as with a window."""
    assert not has_kinds_of_layers(config_of(config_at(DEEP)))
    path = config_at(UNLIKE["windows alternate"])
    monkeypatch.setattr(CompiledRows, "_row_of_copy", lambda self, steps: 1 / 0)
    assert _rows(path, 2048)._deepened_row(Steps(silent, "", 1)) is None


def test_another_process_traces_the_whole_model(config_at, monkeypatch):
    """Where it ends without an answer, this one does."""
    path, traced = config_at(DEEP), []
    copy, room = deepened(_traced(path, FEW), FEW, DEPTH), _rows(path).room
    monkeypatch.setattr(background, "trace", lambda *a: (traced.append(a), trace(*a))[1])
    with WholeModel(room, 2048, 512, 2, silent) as whole:
        assert whole.is_like(copy) and not traced
    monkeypatch.setattr(background, "_in_process", planner_models.end_at_once)
    with WholeModel(room, 2048, 512, 2, silent) as whole:
        assert whole.is_like(copy) and len(traced) == 1


@FULL
def test_the_longest_row_is_as_long_as_by_whole_models(config_at, monkeypatch):
    rows = _rows(config_at(DEEP))
    row = rows.mst_row()
    _without_copies(monkeypatch)
    other = _rows(rows.request.model).mst_row()
    assert row.fits and other.fits and row.length >= (1 - 5 * TOLERANCE) * other.length
