"""Attention's loops over heads as modes of the partition problem: when they are taken, and why."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass import pipeline
from mstpass.bench import record
from mstpass.bench.huggingface import TINY, architectures
from mstpass.bench.models import LlamaSize, llama
from mstpass.limit import Limit
from mstpass.loops import candidate_modes
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.options import Options
from mstpass.partition.solve import solve
from mstpass.partition.solvers.peak_search import peak_search
from tests.attention_models import HEADS, WIDTH, Form, LatentLayer, Layer
from tests.checks import check_against_float64, joint_graph, kinds

pytestmark = pytest.mark.op_by_op

FULL = pytest.mark.full
LLAMA = Form(kv_heads=2, rope="halves", mask="causal")
TOKENS = (2, 512)


def _input() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*TOKENS, WIDTH, requires_grad=True)


def _planned(form: Form, budget: float | str) -> pipeline.Result:
    torch.manual_seed(0)
    model = Layer(form)
    module, outputs = joint_graph(lambda x: model(x).square().mean(), _input())
    options = Options(memory_budget=budget, reconstruct="off", strict=True)
    return pipeline.run(module, options, num_fwd_outputs=outputs)


def test_the_least_memory_is_that_of_a_group_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSimulation, "lowered_program", StepSimulation.program)
    form = dataclasses.replace(LLAMA, kv_heads=HEADS)
    result = _planned(form, 0.0)
    (region,) = result.outcome.regions
    assert (region.kind, region.mode, region.axis) == ("attention", "recompute", "heads")
    assert region.num_chunks == HEADS
    assert result.problem is not None and result.modules is not None
    real = simulate_step(*(module.graph for module in result.modules))
    plan, *_ = solve(
        result.problem, Options(memory_budget=0.0), Limit.of(Options(memory_budget=0.0)), ""
    )
    planned = simulate_plan(result.problem, plan).memory
    assert planned.forward.peak.bytes == pytest.approx(real.forward.peak.bytes, rel=0.01)
    assert planned.backward.peak.bytes == pytest.approx(real.backward.peak.bytes, rel=0.01)
    monkeypatch.setattr(candidate_modes, "attention_candidates", lambda *_: ([], []))
    without = _planned(form, 0.0)
    assert without.outcome.peak_bytes and not without.outcome.regions
    assert real.peak_bytes < 0.85 * without.outcome.peak_bytes


def test_attention_stays_whole_without_a_budget() -> None:
    result = _planned(LLAMA, "free")
    assert not result.outcome.regions and not result.outcome.rejections


@pytest.mark.parametrize(
    ("form", "autocast"),
    [
        (LLAMA, None),
        pytest.param(Form(fused="sections", bias=True), None, marks=FULL),
        pytest.param(LLAMA, "cpu", marks=FULL),
        pytest.param(Form(kernel="matmul", norm="head", mask="sink"), None, marks=FULL),
        pytest.param(Form(norm="all", mask="window"), "cpu", marks=FULL),
        pytest.param(dataclasses.replace(LLAMA, kv_heads=1), None, marks=FULL),
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_gradients(form: Form, autocast: str | None) -> None:
    torch.manual_seed(0)
    model = Layer(form)
    report = check_against_float64(
        model,
        lambda model: lambda x: model(x).square().mean(),
        [_input()],
        autocast=autocast,
        memory_budget=0.0,
    )
    # With autocast the workspace of attention on the CPU is larger than what these sizes save.
    assert autocast or ("attention", "recompute") in kinds(report)


def test_autocast() -> None:
    """Products of autocast's gradients add up in place, in float32."""
    size = LlamaSize(width=256, layers=1, heads=8, mlp_width=256, vocabulary=64, length=4096)
    model, ids, labels = llama(size, "cpu")
    report = check_against_float64(
        model,
        lambda model: lambda ids, labels: model(ids, labels),
        [ids, labels],
        autocast="cpu",
        memory_budget=0.0,
    )
    assert "attention" in {kind for kind, _ in kinds(report)}
    options = {"memory_budget": 0.0, "chunk": "tokens"}
    whole = mstpass.explain(_with_autocast(model), ids, labels, options=options)
    least, without = report.outcome.peak_bytes, whole.outcome.peak_bytes
    assert least and without and least < 0.9 * without


def _with_autocast(model: nn.Module):  # type: ignore[no-untyped-def]
    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, labels)

    return loss


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=FULL)])
def test_latent_attention(padded: bool) -> None:
    torch.manual_seed(0)
    report = check_against_float64(
        LatentLayer(padded),
        lambda model: lambda x: model(x).square().mean(),
        [_input()],
        memory_budget=0.0,
    )
    assert kinds(report) == [("attention", "recompute")]
    assert report.regions[0].num_chunks == HEADS


@pytest.mark.full
def test_checkpointed_attention() -> None:
    torch.manual_seed(0)
    model = Layer(LLAMA)

    def loss_of(model: nn.Module):  # type: ignore[no-untyped-def]
        return lambda x: checkpoint(model, x, use_reentrant=False).square().mean()

    report = check_against_float64(model, loss_of, [_input()], memory_budget=0.0)
    assert kinds(report) == [("attention", "recompute")]


def test_every_layer_of_a_hugging_face_llama() -> None:
    """The gradient of ``rotate_half`` has zeros that are one constant for all layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 200}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=2)
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(200, (1, 1024))
    report = check_against_float64(
        model,
        lambda model: lambda ids: model(input_ids=ids, labels=ids).loss,
        [ids],
        memory_budget=0.0,
        chunk="heads",
    )
    assert kinds(report).count(("attention", "recompute")) == 2, report.rejections


@pytest.mark.full
def test_every_layer_of_a_hugging_face_t5() -> None:
    """Its layers share a bias of positions."""
    pytest.importorskip("transformers")
    arch = architectures(dataclasses.replace(TINY, length=256))["t5"]
    model, batch = arch.build(), arch.batch()
    names = list(batch)

    def loss_of(model: nn.Module):  # type: ignore[no-untyped-def]
        loss = arch.loss_of(model)
        return lambda *values: loss(**dict(zip(names, values, strict=True)))

    report = check_against_float64(model, loss_of, list(batch.values()), memory_budget=0.0)
    found = [region for region in report.regions if region.kind == "attention"]
    assert sum("SelfAttention" in region.source for region in found) == 4, report.rejections


@pytest.mark.full
def test_loops_over_heads_make_no_plan_slower() -> None:
    """Under every budget a step takes at most the time of that with loops over tokens alone."""
    size = LlamaSize(256, layers=5, heads=8, mlp_width=1024, vocabulary=4096, length=8192)
    model, *batch = llama(size, torch.device("cpu"))
    options = {"memory_budget": 0.0, "solver": "auto"}
    tokens, heads = (
        record.problem_of(model, *batch, chunk=chunk, **options) for chunk in ("tokens", "auto")
    )
    highest, lowest = (
        simulate_plan(tokens, peak_search(tokens, budget)).lowered_peak_bytes
        for budget in (None, 0)
    )
    for share, limit in ((0.0, 0.99), (0.15, 1.0001), (0.2, 1.0001)):
        budget = int(lowest + share * (highest - lowest))
        us, with_heads_us = (simulate_plan(p, peak_search(p, budget)).us for p in (tokens, heads))
        assert with_heads_us <= limit * us
