"""`mstpass plan`: fixed memory, the search for a length, and models by name or config."""

from __future__ import annotations

import json

import pytest

from mstpass.planner.lengths import GRAIN, longest
from mstpass.planner.training import Sizes, Training, fixed

pytest.importorskip("transformers")
pytest.importorskip("rich")


from mstpass.planner.models import ModelError, config_of, known, most_positions
from tests.planner_models import TINY, plan_sizes

MIB = 2**20


# ---- accounting --------------------------------------------------------------------------------
SIZES = Sizes(parameters=1000, layer=300, rest=100)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (Training(), (2000, 8000, 0)),
        (Training(dtype="fp32"), (4000, 8000, 0)),
        (Training(dtype="autocast", optimizer="sgd-momentum"), (4000, 4000, 0)),
        (Training(optimizer="adamw-bf16", master_weights=True), (2000, 8000, 0)),
        (Training(optimizer="adamw-8bit"), (2000, 2032, 0)),
        (Training(sharding="zero1", ranks=4), (2000, 2000, 0)),
        (Training(sharding="zero2", ranks=4), (2000, 2000, 600)),
        (Training(sharding="zero3", ranks=4), (500, 2000, 600 + 200 + 1200)),
    ],
)
def test_fixed_bytes(training, expected):
    held = fixed(SIZES, training)
    assert (held.weights, held.optimizer_states, held.gathered) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "fp8"},
        {"optimizer": "lion"},
        {"sharding": "tensor"},
        {"ranks": 0},
        {"sequence_ranks": 3, "ranks": 8},
        {"weights": "nf4"},
    ],
)
def test_wrong_training(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Training(**wrong)


# ---- search ------------------------------------------------------------------------------------
@pytest.mark.parametrize("start", [64, 4096, 500_000])
@pytest.mark.parametrize(
    "size", [lambda n: 8 * n, lambda n: max(10**5 + 3 * n, 9 * n), lambda n: n * n // 10**4]
)
def test_longest_fits_and_little_more_does_not(size, start):
    calls = []
    found = longest(lambda n: calls.append(n) or size(n), 10**6, start)
    assert size(found) <= 10**6 < size(int(1.011 * found) + 2 * GRAIN)
    assert len(calls) <= 14


def test_nothing_fits():
    assert longest(lambda n: 100, 10, 4096) == 0


# ---- models ------------------------------------------------------------------------------------
def test_every_shipped_model_has_a_config():
    for name in known():
        config = config_of(name)
        assert most_positions(config) and config.vocab_size


def test_known_sizes_of_parameters():
    found = {n: plan_sizes(n).parameters for n in ("llama3-8b", "qwen3-0.6b", "gpt2")}
    # as their publishers give them; tied embeddings count once
    assert found == {"llama3-8b": 8_030_261_248, "qwen3-0.6b": 596_049_920, "gpt2": 124_439_808}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({**TINY, "architectures": ["LlamaForSequenceClassification"]}, "not a causal"),
        ({"hidden_size": 64}, "no model_type"),
        ({"model_type": "nonsense"}, "transformers refuses this config"),
    ],
)
def test_configs_that_are_refused(tmp_path, values, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        config_of(str(path))


def test_unreadable_and_missing_configs(tmp_path):
    broken = tmp_path / "config.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot read this config"):
        config_of(str(broken))
    with pytest.raises(ModelError, match="does not exist"):
        config_of(str(tmp_path / "other.json"))
    with pytest.raises(ModelError, match="did you mean 'llama3-8b'"):
        config_of("llama3-8")
