"""`mstpass plan`: what eager and compiled steps hold, and the rows of a plan."""

from __future__ import annotations

import dataclasses
import functools
import io
import json

import pytest
import torch

from mstpass.measure import peak_bytes
from mstpass.planner.lengths import longest
from mstpass.planner.training import Training

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console
from transformers import LlamaForCausalLM

from mstpass.planner.eager_rows import checkpointed, eager_rows, minisequence, plain
from mstpass.planner.eager_step import eager_step
from mstpass.planner.lengths import length_within
from mstpass.planner.models import config_of
from mstpass.planner.plan import plan
from mstpass.planner.request import CHECKPOINT, EAGER, RECIPE, DoesNotFit, Request, silent
from mstpass.planner.room import Room
from mstpass.planner.terminal_table import show
from mstpass.planner.traced_step import trace
from mstpass.tracing.devices import traced_for
from tests.planner_models import TINY, plan_sizes

MIB = 2**20


pytestmark = pytest.mark.usefixtures("one_cublas_workspace")


def request(model, mib=512, **rest):
    training = Training(**{"dtype": "bf16", "optimizer": "adamw", **rest.pop("training", {})})
    return Request(model, training, mib * MIB, 0, **rest)


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


def test_a_product_may_have_a_workspace(tiny, monkeypatch):
    """From torch 2.15 on each product allocates one, and an H100 is assumed."""
    monkeypatch.setattr("mstpass.memory.workspaces.frees_cublas_workspaces", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kept = eager_step(config_of(tiny), Training(), plain, 1024).parts.total
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE")
    each = eager_step(config_of(tiny), Training(), plain, 1024).parts.total
    assert 8 * MIB < each - kept <= 32 * MIB  # the peak may lie elsewhere


def test_recipes_hold_less_one_after_the_other(tiny):
    ways = (plain, checkpointed, minisequence)
    found = [eager_step(config_of(tiny), Training(), way, 2048).parts for way in ways]
    assert found[0].total > found[1].total > found[2].total
    assert found[1].saved < 0.5 * found[0].saved
    assert found[2].logits < 0.2 * found[1].logits
    again = functools.partial(minisequence, mlp_tiles="again")
    assert eager_step(config_of(tiny), Training(), again, 8192).parts.total < 0.8 * (
        eager_step(config_of(tiny), Training(), minisequence, 8192).parts.total
    )


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
    long = trace(config, Training(), 8192, ("free",))
    short = trace(config, Training(), 4100, ("free",), multiple=512)
    whole, scaled = (
        dataclasses.replace(traced.problem_at(8192, "free"), regions=()) for traced in (long, short)
    )
    assert [v.name for v in scaled.values] == [v.name for v in whole.values]
    for one, other in zip(
        (*scaled.values, *scaled.backward), (*whole.values, *whole.backward), strict=True
    ):
        # A value with a row more than there are tokens is rounded to blocks, and not scaled.
        assert one.bytes == pytest.approx(other.bytes, rel=1e-3, abs=64 * 1024), one.name
        assert one.inner_bytes == pytest.approx(other.inner_bytes, rel=1e-3), one.name
    attentions = [value for value in whole.backward if value.inner_bytes]
    assert attentions and all("attention" in value.name for value in attentions)


@pytest.mark.parametrize(
    ("gpu", "dtype", "has_mask"),
    [("h100", "bf16", False), ("h100", "fp32", True), (None, "bf16", True)],
)
def test_a_window_needs_no_mask_where_the_kernel_has_it(tmp_path, gpu, dtype, has_mask):
    """In 16 bits it is that of flash attention, if it is known what the device runs."""
    config = {**TINY, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "sliding_window": 128}))
    if gpu is None and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with traced_for(None, gpu):
        step = trace(config_of(str(path)), Training(dtype=dtype), 1024, ("free",))
    assert (step.square_bytes > 0) == has_mask


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
    # So many tokens that this small model has loops on a GPU, where it needs thousands for each.
    row = plan(request(tiny, 160, alone=True, curves=True)).own
    assert length_within(row.curve, row.total_bytes) == pytest.approx(row.length, rel=0.01)
    assert row.fits and row.length > 4096 and row.total_bytes <= 160 * MIB
    longer = plan(request(tiny, 160, alone=True, length=int(1.1 * row.length))).own
    assert not longer.fits and longer.total_bytes > 160 * MIB


@pytest.mark.full
def test_rows_of_one_length(tiny):
    reports = []
    asked = request(tiny, 200, length=4096, training={"optimizer": "sgd"})
    planned = plan(asked, reports.append, processes=2)
    assert {report.partition(":")[0] for report in reports} == {"mst", "Inductor"}
    by_name = {row.name: row for row in planned.rows}
    assert by_name[EAGER].total_bytes > by_name[CHECKPOINT].total_bytes
    assert by_name[CHECKPOINT].total_bytes > by_name[RECIPE].total_bytes
    assert planned.own.fits and planned.own.memory_budget == "free"
    assert {row.length for row in planned.rows} == {4096}
    for row in planned.rows:
        assert row.total_bytes == row.parts.total + planned.fixed.total
    here = eager_rows(Room(asked, planned.sizes), silent)
    assert here == tuple(by_name[name] for name in (EAGER, CHECKPOINT, RECIPE))
    console = Console(width=80, record=True, file=io.StringIO())
    show(planned, console)
    shown = console.export_text()
    assert "options={'memory_budget': 'free'}" in shown and "4096 tokens are more than" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_length_that_is_too_long_for_a_kernel_is_told(tmp_path):
    """On an A100: flash attention's backward, where it is whole; one group of heads is not."""
    path = tmp_path / "wide.json"
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    path.write_text(json.dumps({**TINY, **heads, "hidden_size": 64}), encoding="utf-8")
    length = 2**31 // (32 * 128) + 16
    notes = {}
    for gib in (1024, 24):
        asked = request(str(path), gib * 1024, length=length, alone=True, gpu="a100")
        planned = plan(asked)
        assert planned.own.fits
        notes[gib] = [note for note in planned.notes if "too long for a kernel" in note]
    assert len(notes[1024]) == 1 and "attention_backward" in notes[1024][0]
    assert not notes[24]


def test_too_little_memory_for_the_weights():
    with pytest.raises(DoesNotFit) as error:
        plan(request("llama3-8b", 80 * 1024))
    message = str(error.value)
    assert "optimizer states 59.8 GiB" in message and "9.7 GiB too much" in message
    assert "--optimizer adamw-8bit" in message and "--sharding zero3 --gpus 2" in message
