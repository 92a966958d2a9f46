"""The peak of Inductor's own schedule; plans whose schedule exceeds the budget are made again."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.virtualized import V

import mstpass
from mstpass import backend, inductor_hooks, pipeline
from mstpass.bench.models import MLPs, Step
from mstpass.captured import OF_INPUTS
from mstpass.limit import MEASURED_OVER_SIMULATED, Limit
from mstpass.measure import peak_bytes
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.options import Options
from mstpass.plans import Outcome
from mstpass.torch_internals import inductor_schedule
from mstpass.torch_internals.pretended_ranks import pretended_ranks

pytestmark = pytest.mark.sampled(2)

CPU = torch.device("cpu")


def _mlps() -> tuple[Callable[[], Tensor], Callable[..., Step]]:
    """MLPs whose gradients of gate, up and product are one kernel, none of them in place."""
    mlps = MLPs.build(1024, 64, 256, 2, CPU)
    return mlps.value, mlps.work().step


def _attention() -> tuple[Callable[[], Tensor], Callable[..., Step]]:
    """Attention with dropout of its scores, which exist; their fusion decides the peak."""
    torch.manual_seed(0)
    qkv = nn.Linear(32, 96)
    return _attended(qkv, lambda x_SD: qkv(x_SD).chunk(3, dim=-1))


def _projections() -> tuple[Callable[[], Tensor], Callable[..., Step]]:
    torch.manual_seed(0)
    each = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    return _attended(each, lambda x_SD: [linear(x_SD) for linear in each])


def _attended(
    module: nn.Module, qkv: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[Callable[[], Tensor], Callable[..., Step]]:
    x_SD = torch.randn(256, 32)

    def value() -> Tensor:
        q, k, v = qkv(x_SD)
        scores = F.dropout((q @ k.t()).softmax(-1), 0.1)
        return (scores @ v).square().mean()

    return value, lambda fn: Step(fn, tuple(module.parameters()))


def _cat() -> tuple[Callable[[], Tensor], Callable[..., Step]]:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    x_ND = torch.randn(512, 64)

    def value() -> Tensor:
        wide = torch.cat([(x_ND @ weight).sin(), (x_ND @ weight.t()).exp()], dim=-1)
        return (wide @ wide.t()).logsumexp(-1).mean()

    return value, lambda fn: Step(fn, (weight,))


def _sorted() -> tuple[Callable[[], Tensor], Callable[..., Step]]:
    """Nobody reads the indices of the sort."""
    torch.manual_seed(0)
    weight, other = torch.randn(64, 512, requires_grad=True), torch.randn(64, 512)
    x_ND = torch.randn(1024, 64)

    def value() -> Tensor:
        return (x_ND @ weight - (x_ND @ other).sort(-1).values).square().mean()

    return value, lambda fn: Step(fn, (weight,))


def _distributions(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, Callable[..., Step]]:
    """The logits of two heads of 8,192 words for each of 1,024 tokens, and a loss between them."""
    torch.manual_seed(0)
    weight, other = torch.randn(8192, 64, requires_grad=True), torch.randn(8192, 64)
    x_ND = torch.randn(1024, 64)
    return lambda: loss(x_ND @ weight.t(), x_ND @ other.t()), lambda fn: Step(fn, (weight,))


def _between_rows(ours: Tensor, theirs: Tensor) -> Tensor:
    """A kernel has a loop over rows alone between those over elements: no row is local."""
    center = torch.linspace(-1, 1, 8192)
    target = ((theirs - center) / 0.04).softmax(-1)
    return -(target * (ours / 0.1).log_softmax(-1)).sum(-1).mean()


def _written_over_twice(ours: Tensor, theirs: Tensor) -> Tensor:
    """A value without memory is written over an operand, and a result over that."""
    a, b = ours.log_softmax(-1), theirs.log_softmax(-1)
    mean = torch.logaddexp(a, b) - math.log(2)
    first, second = (F.kl_div(mean, p, reduction="batchmean", log_target=True) for p in (b, a))
    return (first + second) / 2


@pytest.fixture
def schedules_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's schedules are read as if they needed a quarter more than they do."""
    read = ReadSchedule.peak_bytes.fget
    assert read is not None

    def more(reader: ReadSchedule) -> int | None:
        peak_bytes = read(reader)
        return None if peak_bytes is None else peak_bytes * 5 // 4

    monkeypatch.setattr(ReadSchedule, "peak_bytes", property(more))


def _compiled(value: Callable[[], Tensor], **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(lambda: value(), backend="mst", options=options)


@pytest.mark.parametrize("build", [_mlps, _attention, _cat, _sorted])
@pytest.mark.parametrize("budget", ["free", pytest.param(0.0, marks=pytest.mark.full)])
def test_the_measured_peak_is_the_scheduled_one(build: Any, budget: Any) -> None:
    value, make_step = build()
    step = make_step(_compiled(value, memory_budget=budget, strict=True))
    step()
    report = mstpass.reports()[-1]
    assert report.outcome.scheduled_peak_bytes == report.peak_bytes
    assert report.peak_bytes == pytest.approx(peak_bytes(step), rel=0.03)


@pytest.mark.parametrize("build", [_mlps, _attention, _projections, _cat])
def test_the_least_simulated_peak_is_the_scheduled_one(build: Any) -> None:
    """What recomputed scores share with their own backward runs as one with that."""
    value, make_step = build()
    make_step(_compiled(value, memory_budget=0.0, strict=True, reconstruct="off"))()
    outcome = mstpass.reports()[-1].outcome
    assert outcome.peak_bytes is not None and outcome.scheduled_peak_bytes is not None
    ratio = outcome.scheduled_peak_bytes / outcome.peak_bytes
    assert 1 / MEASURED_OVER_SIMULATED < ratio < MEASURED_OVER_SIMULATED


@pytest.mark.parametrize(("loss", "chunk"), [(_between_rows, "off"), (_written_over_twice, "auto")])
def test_the_measured_peak_of_losses_between_heads(loss: Any, chunk: str) -> None:
    value, make_step = _distributions(loss)
    step = make_step(_compiled(value, chunk=chunk))
    step()
    scheduled = mstpass.reports()[-1].outcome.scheduled_peak_bytes
    assert scheduled is not None and scheduled == pytest.approx(peak_bytes(step), rel=0.03)


@pytest.mark.usefixtures("schedules_need_more")
def test_a_plan_whose_schedule_exceeds_the_budget_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free plan is within the budget as simulated, but not as Inductor schedules it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    value, make_step = _attention()

    def outcome(budget: Any) -> Outcome:
        make_step(_compiled(value, memory_budget=budget, reconstruct="off"))()
        return mstpass.reports()[-1].outcome

    free, least = outcome("free").scheduled_peak_bytes, outcome(0.0).scheduled_peak_bytes
    assert free is not None and least is not None and least < 0.95 * free
    budget = (least + free) // 2
    step = make_step(_compiled(value, memory_budget=budget, strict=True, reconstruct="off"))
    torch.manual_seed(1)
    loss, gradients = step.with_gradients()
    found = mstpass.reports()[-1].outcome
    assert found.limit_bytes is not None and found.limit_bytes < budget / 1.1
    assert found.scheduled_peak_bytes is not None and found.scheduled_peak_bytes <= budget
    assert peak_bytes(step) <= budget * 4 // 5
    torch.compiler.reset()
    inductor = make_step(torch.compile(lambda: value()))
    torch.manual_seed(1)
    want_loss, want = inductor.with_gradients()
    torch.testing.assert_close(loss, want_loss)
    for ours, theirs in zip(gradients, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    # The compile cache holds the last plan, and finds it again.
    again = make_step(_compiled(value, memory_budget=budget, strict=True, reconstruct="off"))
    again()
    report = mstpass.reports()[-1]
    assert report.cached and report.outcome.limit_bytes == found.limit_bytes
    assert peak_bytes(again) <= budget * 4 // 5


@pytest.mark.usefixtures("schedules_need_more")
@pytest.mark.parametrize("fails", ["plan", "compilation"])
def test_an_attempt_that_fails_leaves_what_is_compiled(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the next plan fails, the compiled one stays."""
    value, make_step = _attention()
    options = {"reconstruct": "off", "inductor": {"fx_graph_cache": False}}
    make_step(_compiled(value, memory_budget="free", **options))()
    scheduled = mstpass.reports()[-1].peak_bytes
    assert scheduled is not None
    name = "pipeline.run" if fails == "plan" else "backend.compile_fx"
    first = pipeline.run if fails == "plan" else backend.compile_fx
    calls = 0

    def fail_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("not again")
        return first(*args, **kwargs)

    monkeypatch.setattr(f"mstpass.{name}", fail_later)
    step = make_step(_compiled(value, memory_budget=int(0.97 * scheduled), **options))
    with pytest.warns(UserWarning, match="not again"), pytest.warns(UserWarning, match="lowest"):
        step()
    assert calls == 2 and mstpass.reports()[-1].peak_bytes == pytest.approx(scheduled, rel=0.1)


def test_a_plan_that_needs_as_much_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    base = mstpass.explain(lambda x: (x @ weight).sum(), torch.randn(8, 4))
    planned = {75: (60, 120), 50: (50, 95)}  # by limit: simulated, scheduled

    def again(graph: Any, partitioner: backend.Partitioner) -> str:
        limit_bytes = partitioner.limit.simulated_bytes
        peak, scheduled = planned[limit_bytes or 0]
        partitioner.report = base.with_outcome(
            limit_bytes=limit_bytes, peak_bytes=peak, scheduled_peak_bytes=scheduled
        )
        return f"of {scheduled}"

    monkeypatch.setattr(backend, "_compiled", again)
    first = backend.Partitioner(Options(memory_budget=100))
    first.report = base.with_outcome(limit_bytes=97, peak_bytes=90, scheduled_peak_bytes=120)
    graph: Any = SimpleNamespace(planned_for=OF_INPUTS)
    compiled: Any = "of 120"
    found, best = backend._within_budget(graph, compiled, first)
    assert found == "of 95" and best.report is not None and best.report.peak_bytes == 95


@pytest.mark.parametrize(
    ("limit", "peak", "scheduled", "last", "tighter"),
    [
        (97, 90, 100, False, None),  # within the budget
        (97, 90, 120, False, 75),
        (97, 90, 120, True, 0),
        (60, 70, 120, False, 0),  # no plan is within the limit: only the lowest one is left
        (0, 70, 120, False, None),  # no lower plan is left
        (97, 130, 140, False, None),  # the planner has warned that no plan is within the budget
    ],
)
def test_the_limit_of_the_next_attempt(
    limit: int, peak: int, scheduled: int, last: bool, tighter: int | None
) -> None:
    outcome = Outcome(limit_bytes=limit, peak_bytes=peak, scheduled_peak_bytes=scheduled)
    found = Limit.in_bytes(100).with_simulated(limit).after(outcome, last)
    assert (found and found.simulated_bytes) == tighter


def test_a_budget_that_no_schedule_meets_is_a_warning() -> None:
    value, _ = _attention()
    with pytest.raises(Exception, match="lowest peak found"):
        _compiled(value, memory_budget=64 * 1024, strict=True)().backward()
    with pytest.warns(UserWarning, match="lowest peak found"):
        _compiled(value, memory_budget=64 * 1024)().backward()
    assert any("lowest peak found" in note for note in mstpass.reports()[-1].outcome.notes)


def test_an_unreadable_schedule_leaves_the_simulated_peak(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("no such scheduler")

    monkeypatch.setattr("mstpass.torch_internals.inductor_schedule.read_schedule", fail)
    value, make_step = _cat()
    step = make_step(
        _compiled(value, memory_budget=1 << 30, strict=True, inductor={"fx_graph_cache": False})
    )
    step()
    outcome = mstpass.reports()[-1].outcome
    assert outcome.scheduled_peak_bytes is None and outcome.peak_bytes is not None
    (told,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "cannot read Inductor's schedule" in told and "no such scheduler" in told


# What Inductor writes behind a kernel of a GPU that adds up rows in parts, in a workspace.
_PARTS = "workspace_0[1 * (512) * (1024) : (1 + 1) * (512) * (1024)].view(512, 1024)"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("line", "allocates"),
    [
        (f"buf9 = {_PARTS}.sum(dim=0)", True),  # torch 2.11
        (f"buf9 = {_PARTS}.sum(dim=0).view([1024])", True),
        (f"buf9 = {_PARTS}.sum(dim=0).view([1, 1024]).to(torch.bfloat16)", True),
        (f"buf9 = {_PARTS}.amax(dim=0).view([1024])", True),
        (f"buf9.copy_({_PARTS}.sum(dim=0).view([1024]))", False),  # it has a line of its own
        ("buf9 = buf7; del buf7  # reuse", False),
        ("del workspace_0", False),
    ],
)
def test_the_sum_of_partial_sums_has_a_buffer(
    line: str, allocates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SimpleNamespace(
        name="graph",
        name_to_buffer={"buf9": SimpleNamespace(get_name=lambda: "buf9")},
        wrapper_code=SimpleNamespace(lines=[line]),
        scheduler=SimpleNamespace(nodes=[]),
        is_inference=True,
    )
    monkeypatch.setattr(inductor_schedule, "_bytes_of", lambda *_: 4096)
    with V.set_graph_handler(graph):
        found = inductor_schedule.read_schedule().lines
    assert [line.allocated for line in found] == [{"buf9": 4096}] * allocates


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_what_collectives_have_written_is_in_the_schedule() -> None:
    """Two ranks have half of a head's words each; the results of their sums have no layout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    from tests.ranks.parallel_cases import Head

    with pretended_ranks(2, 0), loss_parallel():
        model, labels = Head(init_device_mesh("cpu", (2,)), 4096, 64), torch.randint(4096, (512,))
        x = torch.randn(512, 64, requires_grad=True)
        loss = _compiled(lambda: F.cross_entropy(model.head(x), labels).to_local(), chunk_tokens=64)

        def step() -> None:
            x.grad = model.head.weight.grad = None
            loss().backward()

        step()
        outcome = mstpass.reports()[-1].outcome
        assert outcome.regions and outcome.scheduled_peak_bytes is not None
        assert outcome.scheduled_peak_bytes == pytest.approx(peak_bytes(step), rel=0.03)


def test_a_torch_that_lacks_the_scheduler_still_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mstpass.torch_internals.inductor_schedule", None)
    monkeypatch.delattr("mstpass.torch_internals.inductor_schedule", raising=False)
    reader = ReadSchedule()
    nodes: list[Any] = [object()]
    assert reader(nodes) is nodes and reader(nodes) is nodes
    assert reader.peak_bytes is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_backward_that_fails_to_compile_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled together with the forward, so both can be given back to Inductor."""
    lower = inductor_hooks.lower_loops

    def fail_in_backward(graph: torch.fx.Graph) -> int:
        if any("tangents" in str(n.target) for n in graph.find_nodes(op="placeholder")):
            raise RuntimeError("no loop here")
        return lower(graph)

    monkeypatch.setattr(inductor_hooks, "lower_loops", fail_in_backward)
    value, make_step = _mlps()
    compiled = _compiled(value, chunk_tokens=256, inductor={"fx_graph_cache": False})
    with pytest.warns(UserWarning, match="mstpass failed on a graph"):
        loss, gradients = make_step(compiled).with_gradients()
    want_loss, want = make_step(value).with_gradients()
    torch.testing.assert_close(loss, want_loss)
    for ours, theirs in zip(gradients, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
