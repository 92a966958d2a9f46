"""`mstpass plan`: the search by shallow copies of a model finds what whole models lead to."""

from __future__ import annotations

import json
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mstpass.planner.lengths import GRAIN, TOLERANCE, next_length
from mstpass.planner.request import CHECKPOINT, EAGER, RECIPE, Request, silent
from mstpass.planner.training import Training

pytest.importorskip("transformers")
pytest.importorskip("rich")

from mstpass.planner import eager_rows
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.eager_step import eager_step
from mstpass.planner.models import NotStacked, build, config_of, keep_layers
from mstpass.planner.room import Room
from mstpass.planner.traced_step import distinct_length
from tests.planner_models import TINY, plan_sizes

pytestmark = pytest.mark.sampled(1)

MIB = 2**20
_BETWEEN_PLANS = 0.05  # of a length: what is planned anew may need less where it is longer
DEEP = {**TINY, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
MODELS = {
    "llama": DEEP,
    "the first layer is dense": {
        **DEEP,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "windows alternate": {
        **DEEP,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "the last layer has rotary embeddings of its own": {
        **DEEP,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 64,
    },
}


@pytest.fixture
def path_of(tmp_path):
    def write(values):
        path = tmp_path / "config.json"
        values = {k: v for k, v in values.items() if k != "architectures"}
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    return write


def _room(model, mib=40, **rest):
    return Room(Request(model, Training(optimizer="sgd"), mib * MIB, 0, **rest), plan_sizes(model))


def _search(room, way):
    config, recipe = config_of(room.request.model), eager_rows.ways(room.request)[way]
    return eager_rows._Search(room, config, recipe, silent)


@pytest.mark.parametrize(
    ("model", "way", "is_known"),
    [
        ("llama", EAGER, True),
        ("llama", RECIPE, True),
        ("the first layer is dense", CHECKPOINT, True),
        ("windows alternate", EAGER, True),
        ("the last layer has rotary embeddings of its own", EAGER, False),
    ],
)
def test_shallow_copies_lead_to_the_row_of_the_whole_model(
    path_of, monkeypatch, model, way, is_known
):
    room = _room(path_of(MODELS[model]))
    search = _search(room, way)
    row = search.row(way)
    assert row.fits and search.is_known == is_known
    monkeypatch.setattr(eager_rows, "_DEEP", math.inf)
    whole = _search(room, way).row(way)
    assert row.length == pytest.approx(whole.length, rel=TOLERANCE)
    if is_known:
        assert row == whole


def test_a_wrong_guess_is_found_out(path_of, monkeypatch):
    """The row is that of the whole step, and close to the longest, whatever copies say."""
    search = _search(_room(path_of(DEEP)), EAGER)
    right = search.row(EAGER)
    guessed = eager_rows._Search._guessed_bytes
    monkeypatch.setattr(
        eager_rows._Search, "_guessed_bytes", lambda self, length: guessed(self, length) // 2
    )
    wrong = _search(search.room, EAGER)
    row = wrong.row(EAGER)
    assert row.fits and not wrong.is_known
    assert row.length == pytest.approx(right.length, rel=TOLERANCE)


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.full), 1.5])
def test_the_row_is_near_the_longest_wherever_the_search_begins(path_of, monkeypatch, share):
    room = _room(path_of({**DEEP, "num_hidden_layers": 2}), 64, alone=True)
    row = lambda: CompiledRows(room, config_of(room.request.model), silent).mst_row()
    searched, start = row(), CompiledRows._start
    monkeypatch.setattr(CompiledRows, "_start", lambda self: int(share * start(self)))
    found = row()
    assert searched.fits and found.fits
    assert found.length == pytest.approx(searched.length, rel=1.5 * _BETWEEN_PLANS)


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**4),
    st.integers(1, 10**5),
    st.integers(1, 2**22),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.01]),
)
def test_lengths_lead_to_the_longest_that_fits(fixed, of_token, most, start, seed, noise):
    """Of bytes that grow with the length, but for what plans differ by."""
    limit = fixed + of_token * most

    def bytes_at(length: int) -> int:
        random = Random(f"{seed} {length}")
        return int((fixed + of_token * length) * random.uniform(1 - noise, 1 + noise))

    points, length = {}, max(GRAIN, start // GRAIN * GRAIN)
    while length is not None and len(points) < 40:
        assert length not in points and length % GRAIN == 0
        points[length] = bytes_at(length)
        guess = length * limit / points[length]
        last, length = length, next_length(points, limit, length, guess)
    assert length is None
    found = max((n for n in points if points[n] <= limit), default=0)
    if found:  # bytes are near the limit; lengths are, by the share of bytes that grow
        near = (TOLERANCE + 0.001 + 2 * noise) * limit / (of_token * most)
        assert found >= (1 - near) * most - 2 * GRAIN
    else:
        assert last == GRAIN


@pytest.mark.parametrize("layers", [2, 8])
def test_an_estimate_is_near_the_row(path_of, layers):
    room = _room(path_of({**DEEP, "num_hidden_layers": layers}), 64, alone=True)
    rows = CompiledRows(room, config_of(room.request.model), silent)
    assert rows.about_longest() == pytest.approx(rows.mst_row().length, rel=0.25)


def test_layers_are_dropped(path_of):
    config = config_of(path_of(DEEP))
    few, whole = (
        eager_step(config, Training(), eager_rows.plain, 64, layers) for layers in (2, None)
    )
    assert 0 < few.parts.saved < 0.5 * whole.parts.saved
    assert len(build(config, Training(), layers=2).model.layers) == 2
    with pytest.raises(NotStacked, match="Linear"):
        keep_layers(nn.Linear(2, 2), 1)


@pytest.mark.parametrize("length", [16, 4096, 6320, 428_544])
@pytest.mark.parametrize("multiple", [16, 512])
def test_a_distinct_length_has_a_prime_of_its_own(length, multiple):
    dims = (4096, 1024, 14336, 128256)
    found = distinct_length(dims, length, multiple)
    assert found % multiple == 0
    assert any(
        found % prime == 0 and all(dim % prime for dim in dims) for prime in range(2, found + 1)
    )
    if length > 4096:
        assert found == pytest.approx(length, rel=0.1 if multiple == 512 else 0.01)
