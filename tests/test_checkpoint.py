"""torch.utils.checkpoint under mst: policies are obeyed, gradients and peaks are right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mstpass
from mstpass import pipeline
from mstpass.bench.models import LlamaSize, llama
from mstpass.graph.joint import JointGraph
from mstpass.graph.recompute_rules import policies_of
from mstpass.measure import peak_bytes
from mstpass.options import Options
from mstpass.problem.problem import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE
from mstpass.problem.saved_set import recomputed
from tests.checks import check_against_float64, compiled, joint_graph, kinds
from tests.models import MLPS

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.op_by_op,
    pytest.mark.filterwarnings("ignore:.*context_fn.*"),
]

aten = torch.ops.aten
Policy = Callable[..., CheckpointPolicy]
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def attention(*_: Any) -> bool:
    return "scaled_dot_product" in str(_[1])


def matmuls(*_: Any) -> bool:
    return _[1] in MATMULS


def saving(
    which: Callable[..., bool],
    save: CheckpointPolicy = CheckpointPolicy.MUST_SAVE,
    rest: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE,
) -> dict[str, Any]:
    """Arguments of ``checkpoint`` that save the results of the ops for which ``which`` is true."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return save if which(context, op) else rest

    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


class Layer(nn.Module):
    """Attention and a gated MLP; with ``post``, a norm follows each, as in Gemma."""

    def __init__(self, d: int, post: bool = False, dropout: float = 0.0):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(4))
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d, bias=False)
        self.mlp, self.post, self.dropout = MLPS["swiglu"](d), post, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + F.dropout(self.norms[2](mixed) if self.post else mixed, self.dropout)
        h = self.mlp(self.norms[1](x))
        return x + F.dropout(self.norms[3](h) if self.post else h, self.dropout)


class Model(nn.Module):
    def __init__(self, layers: int = 2, d: int = 32, **kwargs: Any):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d, **kwargs) for _ in range(layers))

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **how)
        return x.tanh().add(1).mean()  # a mean near zero would have a large relative error


def tokens(d: int = 32) -> torch.Tensor:
    return torch.randn(2, 150, d, requires_grad=True)


def report_of(model: nn.Module, how: dict[str, Any], **options: Any) -> mstpass.Report:
    """Checked against float64, and partitioned by us."""
    report = check_against_float64(model, lambda m: lambda x: m(x, **how), [tokens()], **options)
    plan = report.outcome.save_plan
    assert plan is not None and plan.solver != "torch", report.outcome.notes
    assert not report.outcome.notes
    return report


# ---- gradients ---------------------------------------------------------------------------------
POLICIES = {
    "plain": {},
    "save attention": saving(attention),
    "save matmuls": saving(matmuls),
    "prefer to save matmuls": saving(matmuls, CheckpointPolicy.PREFER_SAVE),
    "must recompute": saving(attention, rest=CheckpointPolicy.MUST_RECOMPUTE),
    "save none": saving(lambda *_: False, rest=CheckpointPolicy.MUST_RECOMPUTE),
}


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("save matmuls", "free"),
        ("must recompute", 0.0),
        *(pytest.param(name, b, marks=FULL) for name in POLICIES for b in ("free", 0.0)),
    ],
)
def test_gradients(name: str, budget: str | float) -> None:
    report_of(Model(), POLICIES[name], memory_budget=budget, chunk_tokens=64)


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=FULL) for n in ("save matmuls", "save none"))]
)
def test_gradients_of_post_norm_layers(name: str) -> None:
    """The backward of the norm behind an MLP reads the MLP's result, which a loop computes."""
    report = report_of(Model(post=True), POLICIES[name], chunk_tokens=64)
    if name == "plain":
        assert kinds(report)[0] == ("mlp", "recompute")


@pytest.mark.parametrize("budget", [0.5, pytest.param("1MiB", marks=FULL)])
def test_budgets_below_what_the_policies_allow(budget: float | str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # 1 MiB cannot be met
        report_of(Model(), POLICIES["save attention"], memory_budget=budget, strict=False)


def test_checkpoints_in_a_checkpoint() -> None:
    model = Model()

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x.tanh(), use_reentrant=False) + x.sum()

    report_of(Nested(model), {})


def test_a_checkpointed_head_fuses() -> None:
    head = nn.Linear(32, 500, bias=False)

    def loss(model: nn.Module) -> Any:
        def run(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), labels)

        return lambda x, labels: checkpoint(run, x.tanh(), labels, use_reentrant=False)

    inputs = [torch.randn(300, 32, requires_grad=True), torch.randint(500, (300,))]
    report = check_against_float64(head, loss, inputs, chunk_tokens=64)
    assert kinds(report) == [("lm_head", "fused")]
    assert report.outcome.save_plan.solver == "peak_search"


# ---- what crosses ------------------------------------------------------------------------------
def _planned(how: dict[str, Any], **options: Any) -> tuple[JointGraph, pipeline.Result]:
    model = Model()
    joint, outputs = joint_graph(lambda x: model(x, **how), tokens())
    result = pipeline.run(joint, Options(**options), num_fwd_outputs=outputs)
    return JointGraph(joint, outputs), result


def _saved(result: pipeline.Result) -> set[str]:
    assert result.outcome.save_plan is not None
    return {value.node for value in result.outcome.save_plan.saved}


def test_a_checkpoint_saves_only_its_inputs() -> None:
    """The first checkpoint's input is an input of the step."""
    joint, result = _planned({}, chunk="off")
    policies = policies_of(joint)
    assert set(policies.tags.values()) == {PREFER_RECOMPUTE}
    inner, _ = joint.sorted(policies.boundary)
    assert _saved(result) == {inner.name}


def test_attention_that_must_be_saved_is_saved() -> None:
    joint, result = _planned(POLICIES["save attention"], chunk="off")
    policies = policies_of(joint)
    must = {node.name for node, tag in policies.tags.items() if tag == MUST_SAVE}
    items = {n.name for n in joint.nodes if any(i.name in must for i in n.all_input_nodes)} & must
    assert len(items) == 4 and items <= _saved(result)
    assert len(_saved(result) - items) == 1
    assert result.problem is not None
    assert not must & set(recomputed(result.problem, frozenset(_saved(result))))


@pytest.mark.parametrize("budget", [0.0, 0.4])
def test_no_budget_breaks_a_policy(budget: float) -> None:
    joint, result = _planned(POLICIES["must recompute"], chunk="off", memory_budget=budget)
    policies = policies_of(joint)
    saved = _saved(result)
    assert not saved & {n.name for n, tag in policies.tags.items() if tag == MUST_RECOMPUTE}
    assert result.problem is not None
    again = recomputed(result.problem, frozenset(saved))
    assert not set(again) & {n.name for n, tag in policies.tags.items() if tag == MUST_SAVE}


def test_a_region_that_ends_in_a_view() -> None:
    """torch recomputes all regions at once where they end in views; here their bases are saved."""

    def part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.tanh() @ w).view(20, 15, 32)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = checkpoint(part, x, w, use_reentrant=False)
        return checkpoint(part, x, w, use_reentrant=False).cos().sum()

    inputs = torch.randn(20, 15, 32), torch.randn(32, 32, requires_grad=True)
    joint, outputs = joint_graph(fn, *inputs)
    policies = policies_of(JointGraph(joint, outputs))
    assert [node.target for node in policies.boundary] == [aten.mm.default] * 2


# ---- dropout -----------------------------------------------------------------------------------
def test_the_mask_of_a_checkpointed_dropout_is_drawn_once() -> None:
    """The gradient of ``dropout(x) * w`` for w shows the forward's mask, that for x backward's."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        run = lambda x, w: F.dropout(x.exp() * w, 0.5) * w
        return checkpoint(run, x, w, use_reentrant=False)

    x, w = (torch.rand(64, 64).add(0.5).requires_grad_() for _ in range(2))
    out = compiled(fn)(x, w)
    out.sum().backward()
    kept = out != 0
    assert 0.3 < float(kept.float().mean()) < 0.7
    assert torch.equal(x.grad != 0, kept) and torch.equal(w.grad != 0, kept)
    assert mstpass.reports()[-1].outcome.save_plan.solver == "peak_search"


@pytest.mark.parametrize("budget", ["free", pytest.param(0.0, marks=FULL)])
def test_dropout_in_checkpoints_is_inductor_s(budget: str | float) -> None:
    model, x = Model(dropout=0.1), tokens()

    def run(backend: str, **kwargs: Any) -> list[torch.Tensor]:
        torch.compiler.reset()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        torch.compile(lambda x: model(x), backend=backend, fullgraph=True, **kwargs)(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    options = {"strict": True, "memory_budget": budget, "chunk_tokens": 64}
    for ours, theirs in zip(run("mst", options=options), run("inductor"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert mstpass.reports()[-1].outcome.save_plan.solver == "peak_search"


def test_draws_from_torch_s_generator_go_to_torch_s_partitioner() -> None:
    model, x = Model(dropout=0.1), tokens()

    def run(fn: Any) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        fn(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    step = compiled(lambda x: model(x), inductor={"fallback_random": True}, chunk_tokens=64)
    for ours, eager in zip(run(step), run(model), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-5)
    assert "draws random numbers" in mstpass.reports()[-1].outcome.left_to_torch


# ---- memory ------------------------------------------------------------------------------------
class Residual(nn.Module):
    """MLPs and a head with its loss: few kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6000, 64), nn.Linear(64, 6000, bias=False)
        self.layers = nn.ModuleList(MLPS["relu"](64) for _ in range(2))

    def forward(self, ids: torch.Tensor, target: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        assert checkpointed
        x = self.embed(ids)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x), target)


def _mlps() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Residual(), torch.randint(6000, (1024,)), torch.randint(6000, (1024,))


def _llama(layers: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return llama(LlamaSize(128, layers, 4, 352, 6000, 1024), torch.device("cpu"))


@pytest.mark.kernels
@pytest.mark.parametrize(
    "make", [_mlps, *(pytest.param(functools.partial(_llama, n), marks=FULL) for n in (2, 4))]
)
def test_a_checkpoint_per_layer_needs_no_more_than_under_inductor(make: Callable[[], Any]) -> None:
    peaks = {}
    for backend in ("inductor", "mst"):
        torch.compiler.reset()
        model, ids, target = make()
        step = torch.compile(
            lambda ids, target, m=model: m(ids, target, checkpointed=True), backend=backend
        )

        def run(step: Any = step, ids: Any = ids, target: Any = target, model: Any = model) -> None:
            model.zero_grad(set_to_none=True)
            step(ids, target).backward()

        run()
        model.zero_grad(set_to_none=True)
        peaks[backend] = peak_bytes(run)
    report = mstpass.reports()[-1]
    assert peaks["mst"] <= 0.7 * peaks["inductor"]
    assert peaks["mst"] == pytest.approx(report.peak_bytes, rel=0.05)
    assert report.baseline_peak_bytes == pytest.approx(peaks["inductor"], rel=0.05)


# ---- torch's own budgets -----------------------------------------------------------------------
@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch 2.13"
)
def test_torch_s_region_budgets_are_left_to_torch() -> None:
    model, x = Model(), tokens()

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.5):
            return _layers(model, x)

    report = check_against_float64(model, lambda m: lambda x: _layers(m, x), [x])
    assert report.outcome.save_plan.solver == "peak_search"
    torch.compiler.reset()
    loss = compiled(fn, chunk_tokens=64)(x)
    torch.testing.assert_close(loss, _layers(model, x))
    loss.backward()
    report = mstpass.reports()[-1]
    assert not report.regions and report.outcome.save_plan.solver == "torch"
    assert "option memory_budget" in str(report.rejections[0])


def _layers(model: Model, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x.tanh().add(1).mean()  # a mean near zero would have a large relative error
