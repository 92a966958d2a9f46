"""`mstpass plan`: a shallow copy whose layers are repeated is the whole model, but for names."""

from __future__ import annotations

import json

import pytest
import torch

from mstpass.planner.training import Training

pytest.importorskip("transformers")
pytest.importorskip("rich")

from mstpass.planner import compiled_rows
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.deepen import CannotDeepen, deepened
from mstpass.planner.lengths import TOLERANCE
from mstpass.planner.models import are_alike, build, config_of
from mstpass.planner.request import Request, silent
from mstpass.planner.room import Room
from mstpass.planner.traced_step import trace
from tests.planner_models import TINY, is_same, plan_sizes

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
    monkeypatch.setattr(compiled_rows, "trace", lambda *a: (layers.append(a[5]), trace(*a))[1])
    row = rows.mst_row()
    assert layers == [FEW]
    _without_copies(monkeypatch)
    other = _rows(rows.request.model, length).mst_row()
    assert row.parts == other.parts and row.memory_budget == other.memory_budget
    assert (row.us, row.extra_time) == pytest.approx((other.us, other.extra_time))


@pytest.mark.parametrize("model", [*ALIKE, *UNLIKE])
def test_layers_are_compared_by_their_modules(config_at, monkeypatch, model):
    """Those that are not alike have no copy."""
    path = config_at({**ALIKE, **UNLIKE}[model])
    with torch.device("meta"):
        assert are_alike(build(config_of(path), Training())) == (model in ALIKE)
    rows = _rows(path, 2048)
    assert rows._layers == (FEW if model in ALIKE else None)


@FULL
def test_the_longest_row_is_as_long_as_by_whole_models(config_at, monkeypatch):
    rows = _rows(config_at(DEEP))
    row = rows.mst_row()
    _without_copies(monkeypatch)
    other = _rows(rows.request.model).mst_row()
    assert row.fits and other.fits and row.length >= (1 - 5 * TOLERANCE) * other.length
