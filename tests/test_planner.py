"""`mstpass plan`: accounting, search, what steps hold, and the command with its errors."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch

from mstpass.cli.main import main
from mstpass.measure import peak_bytes
from mstpass.planner.fixed_memory import Sizes, fixed
from mstpass.planner.longest_sequence import GRAIN, longest
from mstpass.planner.training import Training

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console
from transformers import LlamaForCausalLM

from mstpass.planner.eager_recipes import checkpointed, minisequence, plain
from mstpass.planner.eager_step import eager_step
from mstpass.planner.models import ModelError, config_of, known, most_positions
from mstpass.planner.plan import plan
from mstpass.planner.request import Request
from mstpass.planner.result import CHECKPOINT, EAGER, RECIPE, DoesNotFit
from mstpass.planner.terminal_table import show
from mstpass.planner.traced_step import trace

MIB = 2**20
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("planner") / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return str(path)


def request(model, mib=512, **rest):
    training = Training(**{"dtype": "bf16", "optimizer": "adamw", **rest.pop("training", {})})
    return Request(model, training, mib * MIB, 0, **rest)


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
    "wrong", [{"dtype": "fp8"}, {"optimizer": "lion"}, {"sharding": "tensor"}, {"ranks": 0}]
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


def plan_sizes(name):
    from mstpass.planner.models import build, sizes_of
    from mstpass.torch_internals.fake_tensors import FakeTensorMode

    with FakeTensorMode():
        return sizes_of(build(config_of(name), Training()))


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


# ---- what steps hold ---------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", [plain, checkpointed, minisequence])
def test_eager_steps_hold_what_is_measured(tiny, recipe):
    """The peak of the step on fake tensors is that of the step, run and measured."""
    length = 1024
    planned = eager_step(config_of(tiny), Training(dtype="fp32"), recipe, length).parts.total
    config = config_of(tiny)
    config._attn_implementation = "sdpa"
    loss_of = recipe(LlamaForCausalLM(config).train())
    ids = torch.zeros(1, length, dtype=torch.long)

    def step():
        found = loss_of(ids)
        getattr(found, "loss", found).backward()

    assert planned == pytest.approx(peak_bytes(step), rel=0.03)


def test_recipes_hold_less_one_after_the_other(tiny):
    ways = (plain, checkpointed, minisequence)
    found = [eager_step(config_of(tiny), Training(), way, 2048).parts for way in ways]
    assert found[0].total > found[1].total > found[2].total
    assert found[1].saved < 0.5 * found[0].saved
    assert found[2].logits < 0.2 * found[1].logits


def test_dropped_gradients_do_not_add_up(tiny):
    def gradients(**rest):
        step = eager_step(config_of(tiny), Training(**rest), checkpointed, 16)
        return step.parts.gradients

    whole = gradients()
    assert whole >= 2 * plan_sizes(tiny).parameters * 0.9
    assert gradients(optimizer_in_backward=True) < 0.5 * whole
    assert gradients(sharding="zero2", ranks=8) < 0.5 * whole


def test_a_scaled_problem_is_the_traced_one(tiny):
    config = config_of(tiny)
    long = trace(config, Training(), 8192, ("free",), exact=True)
    short = trace(config, Training(), 4100, ("free",))
    whole, scaled = (
        dataclasses.replace(traced.problem_at(8192, "free"), regions=()) for traced in (long, short)
    )
    assert [v.name for v in scaled.values] == [v.name for v in whole.values]
    for one, other in zip(
        (*scaled.values, *scaled.backward), (*whole.values, *whole.backward), strict=True
    ):
        assert one.bytes == pytest.approx(other.bytes, rel=1e-3), one.name
    assert set(long.workspaces) == set(short.workspaces) and len(long.workspaces) == 1


def test_tied_weights_have_two_gradients_until_they_are_added(tiny, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "tie_word_embeddings": True}), encoding="utf-8")
    rows = {}
    for name, model in (("tied", str(path)), ("untied", tiny)):
        row = plan(request(model, training={"dtype": "fp32"}, length=16, alone=True)).own
        rows[name] = row.parts.gradients
    assert rows["tied"] == pytest.approx(rows["untied"], rel=0.02)
    assert rows["untied"] == pytest.approx(4 * plan_sizes(tiny).parameters, rel=0.02)


# ---- plans -------------------------------------------------------------------------------------
def test_more_memory_is_never_a_shorter_sequence(tiny):
    size = lambda n: eager_step(config_of(tiny), Training(), checkpointed, n).parts.total
    found = [longest(size, mib * MIB, 1024) for mib in (20, 24, 64)]
    assert 0 < found[0] < found[1] < found[2]


def test_the_longest_plan_fits_and_a_longer_one_does_not(tiny):
    row = plan(request(tiny, 48, alone=True)).own
    assert row.fits and row.length > 4096 and row.total_bytes <= 48 * MIB
    longer = plan(request(tiny, 48, alone=True, length=int(1.1 * row.length))).own
    assert not longer.fits and longer.total_bytes > 48 * MIB


def test_rows_of_one_length(tiny):
    planned = plan(request(tiny, 200, length=4096, training={"optimizer": "sgd"}))
    by_name = {row.name: row for row in planned.rows}
    assert by_name[EAGER].total_bytes > by_name[CHECKPOINT].total_bytes
    assert by_name[CHECKPOINT].total_bytes > by_name[RECIPE].total_bytes
    assert planned.own.fits and planned.own.memory_budget == "free"
    assert {row.length for row in planned.rows} == {4096}
    for row in planned.rows:
        assert row.total_bytes == row.parts.total + planned.fixed.total
    console = Console(width=80, record=True, file=io.StringIO())
    show(planned, console)
    shown = console.export_text()
    assert "options={'memory_budget': 'free'}" in shown and "4096 tokens are more than" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_too_little_memory_for_the_weights():
    with pytest.raises(DoesNotFit) as error:
        plan(request("llama3-8b", 80 * 1024))
    message = str(error.value)
    assert "optimizer states 59.8 GiB" in message and "9.7 GiB too much" in message
    assert "--optimizer adamw-8bit" in message and "--sharding zero3 --ranks 2" in message


# ---- the command -------------------------------------------------------------------------------
def test_command_prints_json(tiny, capsys):
    given = ["plan", "--model", tiny, "--device-memory", "200MiB", "--overhead", "0"]
    given += ["--optimizer", "sgd", "--sequence", "2048", "--alone"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["rows"][-1]["length"] == 2048
    assert found["rows"][-1]["parts"]["saved"] > 0


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--device-memory", "lots"], "not a size"),
        (["--device-memory", "1GiB", "--sequence", "0"], "whole number"),
        (["--device-memory", "1GiB", "--sharding", "fsdp"], "needs --ranks"),
        (["--device-memory", "1GiB", "--dtype", "fp32", "--master-weights"], "--dtype bf16"),
        (["--device-memory", "1GiB", "--optimizer", "sgd", "--optimizer-step", "foreach"], "AdamW"),
        (["--device-memory", "1GiB", "--allocator", "other"], "expandable"),
        (["--device-memory", "1GiB", "--document", "0"], "whole number"),
        ([], "--device-memory"),
    ],
)
def test_wrong_arguments_are_refused(capsys, rest, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "gpt2", *rest])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama3-8x", "did you mean 'llama3-8b'"),
        ("no/config.json", "this file does not exist"),
        ("broken.json", "cannot read this config.json"),
    ],
)
def test_an_unknown_or_broken_model_is_named(capsys, tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert main(["plan", "--model", model, "--device-memory", "80GiB"]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_a_model_that_is_too_large_says_so(capsys):
    assert main(["plan", "--model", "llama3-8b", "--device-memory", "8GiB"]) == 1
    assert "does not fit" in capsys.readouterr().err
