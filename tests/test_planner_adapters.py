"""`mstpass plan --lora`: adapters beside frozen weights, in 4 bits or as they are."""

from __future__ import annotations

import pytest
import torch

from mstpass.planner.training import Training, fixed
from mstpass.torch_internals.fake_tensors import FakeTensorMode

pytest.importorskip("transformers")
pytest.importorskip("rich")

from mstpass.cli.main import main
from mstpass.planner.attention import Nf4Linear, TargetError, WithLora
from mstpass.planner.compiled_step import planned
from mstpass.planner.models import build, config_of, sizes_of
from mstpass.planner.plan import plan
from mstpass.planner.request import Request
from mstpass.planner.traced_step import trace

pytestmark = pytest.mark.usefixtures("one_cublas_workspace")

MIB = 2**20
D, L, V, KV = 128, 512, 2048, 64  # of the tiny Llama; KV: features of all keys
LINEAR = 2 * D * D + 2 * D * KV + 3 * D * L  # weights of the linear layers of the one layer
REST = 2 * V * D + 3 * D  # embeddings, head, norms
LORA, QLORA = Training(lora=8), Training(lora=8, weights="nf4")
ADAPTERS = 8 * (4 * D + 2 * (D + KV) + 3 * (D + L))


def sizes(model, training):
    with FakeTensorMode():
        return sizes_of(build(config_of(model), training))


def test_only_adapters_are_trained(tiny):
    found, whole = sizes(tiny, LORA), sizes(tiny, Training())
    assert found.parameters == ADAPTERS
    assert found.frozen.parameters == whole.parameters == LINEAR + REST
    assert found.of_model == LINEAR + REST + ADAPTERS
    held = fixed(found, LORA)
    assert held.weights == 2 * found.of_model and held.optimizer_states == 8 * ADAPTERS


def test_frozen_weights_in_4_bits(tiny):
    """Half a byte for each weight of a linear layer, and a float32 scale for each 64."""
    found = sizes(tiny, QLORA)
    assert found.frozen.parameters == LINEAR + REST
    packed = LINEAR // 2 + 4 * LINEAR // 64
    assert fixed(found, QLORA).weights == packed + 2 * (REST + ADAPTERS)


def test_sharded_frozen_weights_are_gathered(tiny):
    shards = {"sharding": "zero3", "ranks": 4}
    quantized, whole = (
        fixed(sizes(tiny, Training(**shards, lora=8, weights=w)), Training(**shards, lora=8))
        for w in ("nf4", "model")
    )
    assert whole.gathered - quantized.gathered == 2 * (2 * LINEAR - LINEAR // 2 - LINEAR // 16)


def test_target_names_layers(tiny):
    few = sizes(tiny, Training(lora=8, target="q_proj,v_proj"))
    assert few.parameters == 8 * (2 * D + D + KV)
    with FakeTensorMode():
        model = build(config_of(tiny), Training(lora=8, target="q_proj", weights="nf4"))
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, WithLora) and isinstance(attention.k_proj, Nf4Linear)
    assert isinstance(model.lm_head, torch.nn.Linear)
    with pytest.raises(TargetError, match=r"is called query; .* are down_proj.*q_proj"):
        sizes(tiny, Training(lora=8, target="query,q_proj"))


def test_the_graph_has_adapters_and_whole_weights_for_a_while(tiny):
    """A weight in 4 bits is made for its product, in the forward and once more in the backward."""
    step = trace(config_of(tiny), QLORA, 4096, ("free",))
    problem = step.problems["free"]
    made = {v.name: v for v in problem.values if "dequantize_nf4" in v.name}
    assert len(made) == 7 and sum(v.bytes for v in made.values()) == 2 * LINEAR
    assert not any(v.pinned or v.heavy for v in made.values())
    assert len(problem.gradients) == 14
    found = planned(step, 4096, "free", None)
    assert made.keys().isdisjoint(found.plan.saved)
    # not those of queries, keys and values: the first layer's input has no gradient
    assert len(made.keys() & {op.node_name for op in found._program.backward}) == 4
    assert found.parts.gradients <= 2 * ADAPTERS + 14 * 512


def test_rows_of_a_plan_with_adapters(tiny):
    """Eager steps have the same adapters; gradients and states are those of adapters."""
    rows = {}
    for training in (LORA, QLORA):
        found = plan(Request(tiny, training, 200 * MIB, 0, length=2048))
        assert all(row.fits and row.parts.gradients < 1 * MIB for row in found.rows)
        rows[training] = found
    less = rows[LORA].fixed.weights - rows[QLORA].fixed.weights
    assert less == 2 * LINEAR - LINEAR // 2 - LINEAR // 16
    for row, quantized in zip(rows[LORA].rows, rows[QLORA].rows, strict=True):
        assert quantized.total_bytes < row.total_bytes


@pytest.mark.parametrize(
    ("rest", "message"),
    [(["--weights", "nf4"], "need --lora"), (["--target", "q_proj"], "need --lora")],
)
def test_wrong_arguments_are_refused(capsys, rest, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "gpt2", "--device-memory", "1GiB", *rest])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_an_unknown_target_is_an_error_of_one_line(tiny, capsys):
    given = ["plan", "--model", tiny, "--device-memory", "1GiB", "--lora", "8"]
    assert main([*given, "--target", "wq"]) == 2
    shown = capsys.readouterr().err
    assert "its linear layers are" in shown and shown.count("\n") == 1
