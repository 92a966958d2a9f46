"""Reconstruction: the search on random problems, and whole steps, without and with Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mstpass
from mstpass import pipeline
from mstpass.options import Options
from mstpass.partition.reconstruct.choose_drops import Decision, decide
from mstpass.partition.reconstruct.rule import EXACT, TOLERANT, Inverse
from mstpass.partition.solvers.checkpoints import _with_loops_pinned
from mstpass.partition.solvers.forward_places import ForwardPlaces
from mstpass.partition.solvers.min_cut import complete, min_cut
from mstpass.plans import SavePlan
from mstpass.problem import solver_registry
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.problem.saved_set import read_by_backward
from mstpass.problem.verify import InvalidPlan, verify
from mstpass.report.report import Report
from tests.checks import check_against_float64, joint_graph
from tests.models import GatedMLP, TwoLayerMLP
from tests.test_partition import problems

MODES = ("off", "exact", "tolerant")


# ---- the search ---------------------------------------------------------------------------------
def _inverse(target: str, *sources: str) -> Inverse:
    return Inverse(target, sources, sources[0], "sum", TOLERANT)


def _check(problem: CutProblem, saved: frozenset[str], decision: Decision) -> None:
    """Every step's sources are there before it, and all needs are met: no circle can pass."""
    by_name = {value.name: value for value in problem.values}
    had = {value.name for value in problem.values if value.free} | set(decision.saved)
    for name, step in decision.steps:
        value = by_name[name]
        assert step is None or step.target == name
        assert set(value.inputs if step is None else step.sources) <= had, name
        assert step is not None or not value.pinned
        had.add(name)
    assert all(value.name in had for value in problem.values if value.needed)
    assert all(by_name[name].savable for name in decision.saved)
    size = lambda names: sum(by_name[name].bytes for name in names)
    won = sum(drop.bytes for drop in decision.drops)
    assert size(decision.saved) == size(saved) - won
    assert won > 0 if decision.drops else decision.saved == saved


@given(problem=problems(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_decisions_on_random_problems(problem: CutProblem, data: st.DataObject) -> None:
    try:
        saved = read_by_backward(problem, min_cut(problem))
        verify(problem, saved)
    except (InvalidPlan, nx.NetworkXUnbounded):
        return  # a needed view of a heavy view: no plan exists
    inverses = [
        _inverse(target, value.name, *[name for name in value.inputs if name != target])
        for value in problem.values
        for target in value.inputs
        if data.draw(st.booleans())
    ]
    _check(problem, saved, decide(problem, saved, inverses))


def _sum_of_two(*, needed: bool = True) -> CutProblem:
    return CutProblem(
        (
            Value("a", 8, (), pinned=True, needed=True),
            Value("b", 8, (), pinned=True, needed=True),
            Value("c", 8, ("a", "b"), needed=needed),
        )
    )


def test_one_of_a_sum_is_dropped_never_two() -> None:
    """b from c - a and a from c - b at once would be a circle."""
    problem = _sum_of_two()
    inverses = [_inverse("a", "c", "b"), _inverse("b", "c", "a")]
    decision = decide(problem, frozenset("abc"), inverses)
    assert len(decision.saved) == 2 and "c" in decision.saved
    _check(problem, frozenset("abc"), decision)


def test_a_sum_that_is_recomputed_wins_nothing() -> None:
    """With a and b saved, c costs nothing: there is nothing to win by subtracting."""
    problem = _sum_of_two()
    decision = decide(problem, frozenset("ab"), [_inverse("a", "c", "b"), _inverse("b", "c", "a")])
    assert decision.drops == () and decision.saved == frozenset("ab")


def test_a_row_statistic_is_saved_in_place_of_what_it_was_computed_from() -> None:
    problem = CutProblem(
        (
            Value("x", 64, (), pinned=True),
            Value("rstd", 1, ("x",)),
            Value("y", 64, ("x", "rstd"), needed=True),
            Value("z", 64, ("y",), pinned=True),
            Value("xhat", 64, ("x",), needed=True),
        )
    )
    saved = frozenset({"x", "y"})
    verify(problem, saved)
    decision = decide(problem, saved, [_inverse("x", "y", "rstd")])
    assert decision.saved == {"y", "rstd"} and decision.drops[0].extras == ("rstd",)
    assert decision.drops[0].bytes == 63
    too_large = CutProblem(tuple(v if v.name != "rstd" else _wide(v) for v in problem.values))
    assert decide(too_large, saved, [_inverse("x", "y", "rstd")]).drops == ()


def _wide(value: Value) -> Value:
    return Value(value.name, 32, value.inputs)


def test_no_heavy_value_is_recomputed_that_was_not_before() -> None:
    problem = CutProblem(
        (
            Value("x", 8, (), free=True),
            Value("a", 8, ("x",), heavy=True, needed=True),
            Value("b", 8, (), pinned=True, needed=True),
            Value("c", 8, ("a", "b"), needed=True),
        ),
        recompute_heavy=True,
    )
    inverses = [_inverse("b", "c", "a")]
    assert decide(problem, frozenset("bc"), inverses).saved == {"c"}  # a is recomputed anyway
    assert decide(problem, frozenset("abc"), []).saved == frozenset("abc")


# ---- whole steps, run without Inductor ----------------------------------------------------------
class RMSNorm(nn.Module):
    """As in Hugging Face's models: in float32, the result in the input's type."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight * wide).to(x.dtype)


class Mixed(nn.Module):
    """A post-norm block; a product over tokens stands for attention."""

    def __init__(self, d: int, norm: Callable[[int], nn.Module], mlp: nn.Module, drop: float = 0):
        super().__init__()
        self.norm_a, self.norm_b, self.mlp = norm(d), norm(d), mlp
        self.value, self.drop = nn.Linear(d, d, bias=False), drop
        for module in (self.norm_a, self.norm_b):
            nn.init.uniform_(module.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cumsum(self.value(x), 1) / x.shape[1]
        x = x + self.norm_a(F.dropout(mixed, self.drop))
        return x + self.norm_b(F.dropout(self.mlp(x), self.drop))


class PostLayerNorm(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_a(x + torch.cumsum(self.value(x), 1) / x.shape[1])
        return self.norm_b(x + self.mlp(x))


D = 32
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "rms": lambda: [Mixed(D, RMSNorm, GatedMLP(D, 96, "silu")) for _ in range(3)],
    "layer": lambda: [
        PostLayerNorm(D, nn.LayerNorm, TwoLayerMLP(D, 128, "gelu", True)) for _ in range(3)
    ],
    "dropout": lambda: [Mixed(D, nn.LayerNorm, GatedMLP(D, 96, "silu"), 0.2) for _ in range(2)],
}


def _model(name: str) -> nn.Module:
    return nn.Sequential(*MODELS[name](), nn.Linear(D, D)).train()


def _loss(model: nn.Module, autocast: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(x: torch.Tensor) -> torch.Tensor:
        context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            return torch.tanh(model(x).float()).square().mean()

    return loss


def _save_at_every_place(problem: CutProblem, _: int | None) -> Plan:
    """Both terms of every residual sum cross, which better plans recompute."""
    closed = with_modes(problem, {}).allowing(recompute_heavy=True)
    line = ForwardPlaces(closed)
    places = max(line.choices(), key=len)
    kept = frozenset[str]().union(*(line.names_at(place) for place in places))
    return Plan(complete(_with_loops_pinned(closed), kept), {})


@pytest.fixture(autouse=True)
def _every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solver_registry.registered, "every_place", _save_at_every_place)


def _split(graph: Any, outputs: int, mode: str, **options: Any) -> pipeline.Result:
    given = {"solver": "every_place", "reconstruct": mode, **options}
    given = {"memory_budget": 0.0, "chunk_tokens": 64, **given}
    return pipeline.run(graph, Options(**given), num_fwd_outputs=outputs)


def _plan(result: pipeline.Result) -> SavePlan:
    assert result.outcome.save_plan is not None
    return result.outcome.save_plan


def _run(result: pipeline.Result, outputs: int) -> list[torch.Tensor]:
    """Forward and backward as they are, on numbers made for the placeholders."""
    assert result.modules is not None
    forward, backward = result.modules
    torch.manual_seed(0)
    values = [
        torch.randn(n.meta["val"].shape, dtype=n.meta["val"].dtype)
        for n in forward.graph.find_nodes(op="placeholder")
    ]
    torch.manual_seed(1)
    results = forward(*values)
    tangents = [torch.ones_like(result) for result in results[:outputs]]
    return [g for g in backward(*results[outputs:], *tangents) if g is not None]


@pytest.mark.parametrize(
    ("name", "autocast"), [("rms", False), ("rms", True), ("layer", False), ("dropout", False)]
)
def test_fewer_bytes_and_the_same_gradients(name: str, autocast: bool) -> None:
    """Exact: bit for bit those of ``off``. Tolerant: close, for fewer bytes still."""
    graph, outputs = joint_graph(_loss(_model(name), autocast), torch.randn(2, 96, D))
    results = {mode: _split(graph, outputs, mode) for mode in MODES}
    saved = {mode: _plan(result).saved_bytes for mode, result in results.items()}
    expects_exact = autocast or name == "dropout"
    assert saved["exact"] < saved["off"] if expects_exact else saved["exact"] == saved["off"]
    assert saved["tolerant"] < saved["exact"]
    assert {r.grade for r in _plan(results["exact"]).reconstructed} <= {EXACT}
    grades = {r.grade for r in _plan(results["tolerant"]).reconstructed}
    assert TOLERANT in grades
    assert all(r.bytes > 0 and r.sources for r in _plan(results["tolerant"]).reconstructed)
    off, exact, tolerant = (_run(results[mode], outputs) for mode in MODES)
    for a, b, c in zip(off, exact, tolerant, strict=True):
        assert torch.equal(a, b)
        bound = 2e-2 if autocast else 1e-5
        assert float((a - c).norm()) <= bound * float(a.norm()) + 1e-12


def test_a_bfloat16_stream_is_left_alone() -> None:
    model = _model("rms").bfloat16()
    graph, outputs = joint_graph(_loss(model), torch.randn(2, 96, D, dtype=torch.bfloat16))
    plan = _plan(_split(graph, outputs, "tolerant"))
    assert not any("sum" in item.rule for item in plan.reconstructed)


@pytest.mark.parametrize("solver", ["min_cut", "checkpoints"])
def test_a_pre_norm_model_has_nothing_to_win(solver: str) -> None:
    from tests.models import Block

    model = nn.Sequential(*(Block(D, GatedMLP(D, 96, "silu")) for _ in range(2)))
    graph, outputs = joint_graph(_loss(model), torch.randn(2, 96, D, requires_grad=True))
    off, tolerant = (_split(graph, outputs, m, solver=solver, chunk="off") for m in MODES[::2])
    assert _plan(tolerant).saved_bytes == _plan(off).saved_bytes


def test_symbolic_sizes() -> None:
    graph, outputs = joint_graph(_loss(_model("rms")), torch.randn(2, 96, D), dynamic=True)
    off, tolerant = (_plan(_split(graph, outputs, mode)) for mode in MODES[::2])
    assert tolerant.saved_bytes < off.saved_bytes


def test_the_report_tells_and_survives_json(tmp_path: Any) -> None:
    graph, outputs = joint_graph(_loss(_model("rms")), torch.randn(2, 96, D))
    report = Report(_split(graph, outputs, "tolerant").outcome)
    (first, *_) = report.reconstructed
    assert first.grade == TOLERANT and first.bounds and "sum" in first.rule
    assert f"{first.node}" in str(report) and "reconstructed, " in str(report)
    report.to_json(tmp_path / "report.json")
    assert Report.from_json(tmp_path / "report.json").reconstructed == report.reconstructed


# ---- under Inductor -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", pytest.param("tolerant", marks=pytest.mark.full)])
def test_gradients_under_inductor(mode: str) -> None:
    report = check_against_float64(
        _model("rms"),
        lambda model: lambda x: torch.tanh(model(x).float()).square().mean(),
        [torch.randn(2, 96, D)],
        autocast="cpu",
        memory_budget=0.0,
        chunk_tokens=64,
        reconstruct=mode,
        solver="every_place",
    )
    assert report.reconstructed


def test_masks_are_packed_where_they_are_made() -> None:
    """Behind the forward, what they are made from would have lived as long: more than is won."""
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + F.dropout((x @ weight).relu(), 0.1) @ weight.t()
            x = x + F.dropout((x @ x.t()).softmax(-1), 0.1) @ x
        return x.square().mean()

    def report(mode: str) -> Any:
        options = {"memory_budget": 0.0, "reconstruct": mode}
        return mstpass.explain(loss, torch.randn(512, 64), options=options)

    bytes_, bits = report("off"), report("exact")
    assert {item.rule for item in bits.reconstructed} == {"bits"}
    assert bits.saved_bytes < bytes_.saved_bytes and bits.peak_bytes < bytes_.peak_bytes


@pytest.mark.slow
def test_dropout_masks_as_bits_under_inductor() -> None:
    """With equal seeds, gradients are the same whether masks cross as bits or as bytes."""
    model, x = _model("dropout"), torch.randn(2, 96, D)

    def gradients(mode: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        options = {"strict": True, "chunk": "off", "reconstruct": mode, "memory_budget": 0.0}
        step = torch.compile(_loss(model), backend="mst", options=options)
        torch.manual_seed(3)
        step(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    bytes_, bits = gradients("off"), gradients("exact")
    off, exact = mstpass.reports()[-2:]
    assert exact.saved_bytes < off.saved_bytes
    assert "bits" in {item.rule for item in exact.reconstructed}
    for a, b in zip(bytes_, bits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


# ---- models of Hugging Face ---------------------------------------------------------------------
VOCAB = 600
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 2}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
        "gemma3": (
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            {"num_key_value_heads": 2, "head_dim": 8},
        ),
        "bert": ("BertConfig", "BertForMaskedLM", OFF),
    }
    config, model, extra = kinds[name]
    built: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(**SIZES, **TOKENS, **extra)
    )
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return built.train()


def _hf_loss(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    extra = {} if "Bert" in type(model).__name__ else {"use_cache": False}
    return lambda ids: model(input_ids=ids, labels=ids, **extra).loss


_MODELS = [
    (name, autocast) for name in ("olmo2", "gemma3", "bert", "llama") for autocast in (None, "cpu")
]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("name", "autocast"), _MODELS)
def test_hugging_face_models(name: str, autocast: str | None) -> None:
    model, ids = _hugging_face(name), torch.randint(3, VOCAB, (2, 64))
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with context:
            return _hf_loss(model)(ids)

    graph, outputs = joint_graph(loss, ids)
    saved = {mode: _plan(_split(graph, outputs, mode)).saved_bytes for mode in MODES}
    assert saved["tolerant"] <= saved["exact"] <= saved["off"]
    if name in ("olmo2", "gemma3") and autocast:
        assert saved["exact"] < saved["off"]
    check_against_float64(
        model,
        _hf_loss,
        [ids],
        autocast=autocast,
        memory_budget=0.0,
        chunk_tokens=64,
        reconstruct="tolerant",
    )
