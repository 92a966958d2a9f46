"""Symbolic sizes: one compilation serves all lengths, and gradients are right at each length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mstpass
from mstpass import pipeline
from mstpass.bench.models import Layer, LlamaSize, RMSNorm
from mstpass.graph import sizes
from mstpass.graph.joint import tensors_of
from mstpass.options import Options
from mstpass.torch_internals.caches import counters
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from tests.attention_models import WIDTH, Form
from tests.attention_models import Layer as AttentionLayer
from tests.checks import STRICT, errors, gradients, in_float64, joint_graph, kinds
from tests.models import MLPS, Block, TinyLM, next_token_loss

pytestmark = [pytest.mark.sampled(2), pytest.mark.op_by_op]

FULL = pytest.mark.full

C, D, VOCAB = 40, 32, 600
LENGTHS = (97, 7, C - 1, C, C + 1, 2 * C, 2 * C + 1, 1)

LossOf = Callable[[nn.Module], Callable[..., torch.Tensor]]
Batches = Iterable[Sequence[torch.Tensor]]


def _compiled(fn: Callable[..., Any], dynamic: bool | None, **options: Any) -> Callable[..., Any]:
    options = {**STRICT, "chunk_tokens": C, **options}
    return torch.compile(fn, backend="mst", fullgraph=True, dynamic=dynamic, options=options)


def _check(
    model: nn.Module, loss_of: LossOf, batches: Batches, dynamic: bool | None, **options: Any
) -> tuple[mstpass.Report, int]:
    """Compare every batch with eager. Returns the last report and the number of compiled graphs."""
    step = _compiled(loss_of(model), dynamic, **options)
    before = counters["stats"]["unique_graphs"]
    for inputs in batches:
        wide_model, wide_inputs = in_float64(model, inputs)
        exact = gradients(wide_model, loss_of(wide_model), wide_inputs)
        eager = errors(gradients(model, loss_of(model), inputs), exact)
        ours = errors(gradients(model, step, inputs), exact)
        assert len(ours) == len(eager)
        for mine, theirs in zip(ours, eager, strict=True):
            assert mine <= theirs + 1e-6, ([x.shape for x in inputs], ours, eager)
    return mstpass.reports()[-1], counters["stats"]["unique_graphs"] - before


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, requires_grad=True)


def _next_token(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda ids: next_token_loss(model, ids)


def _per_sequence(model: nn.Module) -> Callable[..., torch.Tensor]:
    """A loss that mixes the sequences in a way that no single scalar tangent describes."""

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.logits(ids)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return torch.logsumexp(each.view(ids.shape).mean(1), 0)

    return loss


def _through(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x: torch.logsumexp(model(x).sin().sum(-1).flatten(), 0)


class TinyLlama(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        size = LlamaSize(D, layers, 4, 3 * D, VOCAB, 256)
        self.embed, self.norm = nn.Embedding(VOCAB, D), RMSNorm(D)
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))
        self.head = nn.Linear(D, VOCAB, bias=False)
        angles = torch.outer(torch.arange(256), torch.linspace(1, 0.01, 4)).repeat(1, 2)
        self.register_buffer("angles", angles)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, angles = self.embed(ids), self.angles[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), 1)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# ---- numerics ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.kernels
def test_head_of_any_length() -> None:
    model = TinyLM(VOCAB, D)
    batches = [[_ids(1, n)] for n in LENGTHS]
    report, graphs = _check(model, _next_token, batches, dynamic=True)
    assert graphs == 2, "one for all lengths, and one for the length 1 that Dynamo specializes"
    symbolic = mstpass.reports()[-2]
    assert kinds(symbolic) == [("lm_head", "fused")], symbolic
    assert symbolic.regions[0].symbolic and "up to 40" in str(symbolic)
    assert not report.regions


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        Form(kv_heads=2, rope="halves", mask="causal"),
        pytest.param(Form(kernel="matmul", bias=True, norm="head", mask="sink"), marks=FULL),
        pytest.param(Form(fused="sections", bias=True, rope="pairs"), marks=FULL),
        pytest.param(Form(rope="complex", mask="causal"), marks=FULL),
        pytest.param(Form(fused="heads", mask="window"), marks=FULL),
        pytest.param(Form(kernel="matmul", mask="heads", cap=5.0), marks=FULL),
        pytest.param(Form(lora=4, kv_heads=1), marks=FULL),
    ],
    ids=lambda form: f"{form.kernel} {form.mask} {form.fused} {form.rope}",
)
def test_attention_of_any_length(form: Form) -> None:
    model = AttentionLayer(form)

    def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda x: model(x).square().mean()

    shapes = [(2, 96), (3, 70), (4, 71), (2, 200)]
    batches = [[torch.randn(*shape, WIDTH, requires_grad=True)] for shape in shapes]
    report, graphs = _check(model, loss_of, batches, dynamic=True, memory_budget=0.0)
    assert kinds(report) == [("attention", "recompute")], report
    assert graphs == 1


@pytest.mark.slow
def test_head_whose_loss_reads_a_symbolic_size() -> None:
    """The mean over tokens divides by their number, which enters the loop as a size."""
    model = TinyLM(VOCAB, D)

    def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
        def loss(ids: torch.Tensor) -> torch.Tensor:
            logits = model.logits(ids).flatten(0, 1)
            return F.cross_entropy(logits, ids.flatten(), reduction="none").mean()

        return loss

    report, graphs = _check(model, loss_of, [[_ids(2, n)] for n in (48, 5, C, 61)], dynamic=True)
    assert kinds(report) == [("lm_head", "fused")], report
    assert graphs == 1


@pytest.mark.slow
def test_head_with_a_loss_of_its_own_per_sequence() -> None:
    model = TinyLM(VOCAB, D, bias=True)
    shapes = [(2, 48), (3, 5), (7, C), (2, 20), (5, 67), (2, 2)]
    batches = [[_ids(*shape), _ids(*shape)] for shape in shapes]
    report, graphs = _check(model, _per_sequence, batches, dynamic=True)
    assert kinds(report) == [("lm_head", "recompute")], report
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "mode"),
    [
        pytest.param(1.0, "save", marks=pytest.mark.kernels),
        pytest.param(0.0, "recompute", marks=pytest.mark.full),
    ],
)
def test_mlp_of_any_length(budget: float, mode: str) -> None:
    model = Block(D, MLPS["swiglu_bias"](D))
    batches = [[_x(1, n)] for n in LENGTHS[:-1]]
    report, graphs = _check(model, _through, batches, dynamic=True, memory_budget=budget)
    assert kinds(report) == [("mlp", mode)], report
    assert graphs == 1


@pytest.mark.full
@pytest.mark.parametrize("name", MLPS)
def test_every_mlp_of_any_length(name: str) -> None:
    model = Block(D, MLPS[name](D))
    batches = [[_x(*shape)] for shape in [(2, 48), (3, 5), (5, 67), (2, C)]]
    report, graphs = _check(model, _through, batches, dynamic=True)
    assert kinds(report) == [("mlp", "save")], report
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims", [(0, 1), *(pytest.param((dim,), marks=pytest.mark.full) for dim in (0, 1))]
)
def test_marked_dims(dims: tuple[int, ...]) -> None:
    shapes = [(3, 33)] + [
        (b if 0 in dims else 3, s if 1 in dims else 33)
        for b, s in [(2, 7), (5, 61), (8, 10), (4, C)]
    ]
    batches = [[_ids(*shape), _ids(*shape)] for shape in shapes]
    for batch in batches:
        for x in batch:
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
    report, graphs = _check(TinyLlama(layers=1), lambda model: model.forward, batches, dynamic=None)
    assert kinds(report)[0] == ("lm_head", "fused"), report
    assert [kind for kind, _ in kinds(report)[1:]] == ["mlp"], report
    assert graphs == 1


@pytest.mark.slow
def test_second_length_makes_the_size_symbolic() -> None:
    batches = [[_ids(2, n), _ids(2, n)] for n in (64, 97, 30, 19, 128)]
    report, graphs = _check(TinyLlama(layers=1), lambda model: model.forward, batches, dynamic=None)
    assert kinds(report)[0] == ("lm_head", "fused") and len(report.regions) == 2, report
    assert report.regions[0].symbolic
    assert graphs == 2, "one static, one for all other lengths"


def test_the_last_token_counts() -> None:
    model = TinyLM(VOCAB, D)

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten(), reduction="sum")

    step = _compiled(loss, dynamic=True)
    for n in (C + 1, 2 * C, 97, 7):
        ids, labels = _ids(2, n), _ids(2, n)
        other = labels.clone()
        other[-1, -1] = (labels[-1, -1] + 1) % VOCAB
        changed = loss(ids, other) - loss(ids, labels)
        found = step(ids, other) - step(ids, labels)
        torch.testing.assert_close(found, changed, rtol=1e-3, atol=1e-3)
        assert changed.abs() > 0.01


# ---- compilations ------------------------------------------------------------------------------
def _graphs_of_ten_lengths(backend: str, options: dict[str, Any]) -> int:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = TinyLM(VOCAB, D)
    step = torch.compile(_next_token(model), backend=backend, options=options)
    before = counters["stats"]["unique_graphs"]
    for n in (50, 60, 20, C, C - 1, 2 * C, 7, 3, 101, 2):
        step(_ids(2, n)).backward()
    return counters["stats"]["unique_graphs"] - before


@pytest.mark.full
def test_no_more_compilations_than_inductor() -> None:
    theirs = _graphs_of_ten_lengths("inductor", {})
    assert _graphs_of_ten_lengths("mst", {**STRICT, "chunk_tokens": C}) <= theirs


# ---- plans -------------------------------------------------------------------------------------
CASES: dict[str, tuple[LossOf, Callable[[], nn.Module], tuple[int, ...]]] = {
    "head": (_next_token, lambda: TinyLM(VOCAB, D), (2,)),
    "per_sequence": (_per_sequence, lambda: TinyLM(VOCAB, D), (2, 2)),
    "llama": (lambda m: m.forward, TinyLlama, (2, 2)),
    **{name: (_through, lambda name=name: Block(D, MLPS[name](D)), ()) for name in MLPS},
}


# MLPs whose ops are those of others; they run with --all
ALIKE = ("gelu", "gelu_tanh", "relu", "geglu", "swiglu")
FULL = pytest.mark.full


@pytest.mark.parametrize("name", [pytest.param(n, marks=FULL) if n in ALIKE else n for n in CASES])
def test_a_dynamic_plan_equals_the_static_one_and_adds_no_guards(name: str) -> None:
    loss_of, build, ids = CASES[name]
    loss = loss_of(build())
    inputs = [_ids(2, 48) for _ in ids] or [_x(2, 48)]
    options = Options.parse({"chunk_tokens": C}, environ={})
    outcomes = []
    for dynamic in (False, True):
        graph, outputs = joint_graph(loss, *inputs, dynamic=dynamic)
        values = [v for n in graph.graph.nodes for v in tensors_of(n.meta.get("val"))]
        environment = values[0].fake_mode.shape_env
        guards = len(environment.guards)
        outcomes.append(pipeline.run(graph, options, num_fwd_outputs=outputs).outcome)
        assert len(environment.guards) == guards, environment.guards[guards:]
        assert all(r.symbolic == dynamic for r in outcomes[-1].regions)
    static, symbolic = outcomes
    shown = [(r.kind, r.mode, r.source, r.num_chunks, len(r.saved)) for r in static.regions]
    assert shown, static.rejections
    assert shown == [
        (r.kind, r.mode, r.source, r.num_chunks, len(r.saved)) for r in symbolic.regions
    ], symbolic.rejections
    assert static.save_plan is not None and symbolic.save_plan is not None
    assert static.save_plan.saved_bytes == symbolic.save_plan.saved_bytes
    assert symbolic.save_plan.solver == "peak_search"


def test_a_symbolic_width_is_refused() -> None:
    def fn(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp((F.relu(x @ up) @ down).sin().sum(-1), 0)

    leaves = [torch.randn(*s, requires_grad=True) for s in ((96, D), (D, 4 * D), (4 * D, D))]
    graph, outputs = joint_graph(fn, *leaves, dynamic=True)
    options = Options.parse({"chunk_tokens": C}, environ={})
    outcome = pipeline.run(graph, options, num_fwd_outputs=outputs).outcome
    assert not outcome.regions
    assert "a dim other than the token dims has a symbolic size" in outcome.rejections[0].reason


@pytest.mark.parametrize("static", [(), ("hidden",), ("vocabulary",), ("hidden", "vocabulary")])
def test_a_head_of_symbolic_width_is_refused_until_it_is_marked(static: tuple[str, ...]) -> None:
    def fn(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden.tanh() @ head.t(), labels)

    hidden, head = (torch.randn(n, D, requires_grad=True) for n in (192, VOCAB))
    if "hidden" in static:
        torch._dynamo.mark_static(hidden, 1)
        torch._dynamo.mark_static(head, 1)
    if "vocabulary" in static:
        torch._dynamo.mark_static(head, 0)
    labels = torch.randint(0, VOCAB, (192,))
    graph, outputs = joint_graph(fn, hidden, head, labels, dynamic=True)
    options = Options.parse({"chunk_tokens": C}, environ={})
    result = pipeline.run(graph, options, num_fwd_outputs=outputs, stop_after="plan")
    if len(static) == 2:
        assert [region.kind for region in result.outcome.regions] == ["lm_head"]
    else:
        (rejection,) = result.outcome.rejections
        assert "mark_static" in rejection.fix


def test_a_short_first_batch_does_not_refuse_the_long_ones() -> None:
    graph, outputs = joint_graph(_next_token(TinyLM(VOCAB, D)), _ids(2, 9), dynamic=True)
    outcome = pipeline.run(graph, Options.parse(None, environ={}), num_fwd_outputs=outputs).outcome
    assert [(r.kind, r.mode) for r in outcome.regions] == [("lm_head", "fused")]
    assert outcome.regions[0].chunk_tokens > 18


# ---- sizes -------------------------------------------------------------------------------------
def test_different_size_expressions_get_different_sizes() -> None:
    environment = ShapeEnv()
    value = FakeTensorMode(shape_env=environment).from_tensor(torch.randn(6, 5, 4))
    rows, columns, guards = value.shape[0], value.shape[1], len(environment.guards)
    same = [sizes.generic(rows * columns), sizes.generic(columns * rows)]
    assert same[0] == same[1]
    other = [rows * columns + 1, rows, 2 * rows, rows * rows * columns, rows * columns // 2]
    assert len({*same, *map(sizes.generic, other)}) == 1 + len(other)
    assert sizes.hint_shape(value) == [6, 5, 4]
    assert sizes.generic(7) == 7
    assert len(environment.guards) == guards


def test_equal_products_of_sizes_stay_equal() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    ids, labels, mask = (
        mode.from_tensor(torch.randn(6, 5), symbolic_context=context) for _ in range(3)
    )
    for other in (labels, mask):
        assert sizes.generic(ids.numel()) != sizes.generic(other.numel())
        assert ids.shape[0] * ids.shape[1] == other.shape[0] * other.shape[1]  # installs a guard
        assert sizes.generic(ids.numel()) == sizes.generic(other.numel())
    assert not sizes.same_shape(ids.shape, labels.shape)
    assert len({*map(sizes.generic, (*ids.shape, *labels.shape, *mask.shape))}) == 6


def test_the_generic_point_of_inputs_labels_and_masks_is_small() -> None:
    """Three pairs of sizes that are known to be equal: their products still count few elements."""
    a, b, c, d, e, f = sympy.symbols("a b c d e f", integer=True, positive=True)
    point = sizes._GenericPoint([sympy.Eq(a, b), sympy.Eq(c, d), sympy.Eq(b * d, e * f)])
    assert point.value(a * c) == point.value(e * f) == point.value(b * d)
    assert point.value(a * c) < 2**42


def test_the_generic_point_of_shifted_logits_and_labels() -> None:
    """``logits[:, :-1]`` and ``labels[:, 1:]``, each with a batch and a length of its own."""
    a, b, c, d = sympy.symbols("a b c d", integer=True, positive=True)
    logits, labels = a * (b - 1), c * (d - 1)
    point = sizes._GenericPoint([sympy.Eq(logits, labels)])
    assert point.value(logits) == point.value(labels) < 2**42
    assert len(set(map(point.value, (a, b, c, d, a * b, c * d)))) == 6
    others = sizes._GenericPoint([sympy.Eq(a * (b - 1), 4 * (c - 1)), sympy.Eq(a * b, c * d)])
    assert others.value(a * b) == others.value(c * d)
