"""Budgets never contradict each other, nor the plans that are known without a search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import mstpass
from mstpass import pipeline
from mstpass.bench.problems import load, names
from mstpass.fuzz.plans import Budget, contradictions
from mstpass.graph.joint import JointGraph
from mstpass.limit import Limit
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.memory.simulate_graph import op_of
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.solve import missed_budgets, over_budget
from mstpass.partition.solvers.candidate import TIE, known_plans
from mstpass.partition.solvers.free_plan import free_plan
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.plans import Outcome
from mstpass.problem.op import Op
from tests.checks import joint_graph
from tests.models import MLPS, Attention, Block, TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op

_MIB = 2**20
_SMALL = 1200  # ops of a recorded problem that is searched in a second


# ---- the search ---------------------------------------------------------------------------------
def _small_problems() -> list[str]:
    sizes = {name: load(name) for name in names()}
    return [n for n, p in sizes.items() if len(p.values) + len(p.backward) <= _SMALL]


@pytest.mark.parametrize("name", _small_problems())
def test_no_budget_is_worse_than_a_plan_that_is_known(name: str) -> None:
    problem = load(name)
    free = problem.cached(free_plan)
    known = (free, *known_plans(problem))
    least = simulate_plan(problem, peak_search(problem, 0))
    assert least.lowered_peak_bytes <= TIE * min(plan.peak_bytes for plan in known)
    for plan in known:
        step = simulate_plan(problem, peak_search(problem, plan.peak_bytes))
        assert step.lowered_peak_bytes <= plan.peak_bytes
        assert step.us <= plan.us or plan.peak_bytes >= free.peak_bytes
    assert peak_search(problem, free.peak_bytes) == free.plan
    assert peak_search(problem, 2 * free.peak_bytes) == free.plan


# ---- the whole pipeline -------------------------------------------------------------------------
def _couplings(x: Tensor, rounds: int = 4) -> Tensor:
    """Sums over rows and over columns of one matrix, in turn."""
    costs = x.square().sum(1)[:, None] - 2 * x @ x.t()
    f = g = torch.zeros(len(x))
    for _ in range(rounds):
        f = -torch.logsumexp(g[None] - costs, 1)
        g = -torch.logsumexp(f[:, None] - costs, 0)
    return (torch.exp(f[:, None] + g[None] - costs) * costs).sum()


class _Adapted(nn.Module):
    """A frozen head with a trained part of rank 4, behind a trained layer."""

    def __init__(self, vocab: int = 4096, d: int = 64, rank: int = 4):
        super().__init__()
        self.before = nn.Linear(d, d)
        self.head = nn.Linear(d, vocab, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(d, rank, bias=False), nn.Linear(rank, vocab, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.before(x)
        return F.cross_entropy(self.head(h) + self.up(self.down(h)), target)


_STATES = torch.randn(1024, 64, requires_grad=True)
_TARGET = torch.randint(4096, (1024,))
_ADAPTED, _TINY = _Adapted(), TinyLM(4096, 64)
_BLOCKS = nn.Sequential(*(Block(64, MLPS["relu"](64)) for _ in range(2)))
_ATTENTION = nn.Sequential(Attention(64, 4), Attention(64, 4))
_PIXELS = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 20, 1))
_IMAGES = torch.randn(2, 3, 16, 16), torch.randint(20, (2, 64, 64))


def _pixels(x: Tensor, classes: Tensor) -> Tensor:
    large = F.interpolate(_PIXELS(x), scale_factor=4, mode="bilinear")
    return F.cross_entropy(large, classes)


_STEPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "head": (lambda ids: next_token_loss(_TINY, ids), (torch.randint(4096, (2, 512)),)),
    "mlps": (lambda x: _BLOCKS(x).square().mean(), (_STATES,)),
    "attention": (lambda x: _ATTENTION(x).square().mean(), (torch.randn(2, 256, 64),)),
    "couplings": (_couplings, (torch.randn(256, 32, requires_grad=True),)),
    "pixels": (_pixels, _IMAGES),
    "adapted": (lambda x, target: _ADAPTED(x, target), (_STATES, _TARGET)),
}


def _outcome(joint: fx.GraphModule, outputs: int, budget: Budget) -> Outcome:
    options = Options(memory_budget=budget)
    return pipeline.run(joint, options, num_fwd_outputs=outputs, before_schedule=True).outcome


@pytest.mark.parametrize("name", _STEPS)
def test_budgets_do_not_contradict_each_other(name: str) -> None:
    step, inputs = _STEPS[name]
    joint, outputs = joint_graph(step, *inputs)
    assert not list(map(str, contradictions(functools.partial(_outcome, joint, outputs))))


@pytest.mark.parametrize("budget", [0.4, 0.0])
def test_small_sums_do_not_make_tiny_chunks(budget: float) -> None:
    """Chunks before sections have no more to gain than the gradients that these write; here next to
    nothing, so that they were of one token each."""
    joint, outputs = joint_graph(_ADAPTED, _STATES, _TARGET)
    outcome = _outcome(joint, outputs, budget)
    (head,) = outcome.regions
    assert head.num_chunks <= 32
    assert outcome.extra_time is not None and outcome.extra_time < 0.6
    assert outcome.peak_bytes is not None and outcome.baseline_peak_bytes is not None
    assert outcome.peak_bytes < 0.3 * outcome.baseline_peak_bytes


def test_the_problem_has_all_that_is_known_of_an_op() -> None:
    joint, outputs = joint_graph(_couplings, torch.randn(256, 32, requires_grad=True))
    graph = JointGraph(joint, outputs)
    problem = cut_problem(graph)
    names = {field.name for field in dataclasses.fields(Op)} - {"bytes", "inputs"}
    for value in (*problem.values, *problem.backward):
        op = op_of(graph.by_name[value.name])
        assert all(getattr(value, name) == getattr(op, name) for name in names), value.name


# ---- what the schedule says ---------------------------------------------------------------------
_SAID = "memory_budget=1.0 KiB cannot be met: the lowest peak found is 2.0 KiB"


def test_a_budget_is_missed_only_if_the_schedule_misses_it() -> None:
    limit = Limit.in_bytes(1024)
    simulated = Outcome((), (), peak_bytes=2048, notes=("other", _SAID))
    within, above = (
        dataclasses.replace(simulated, scheduled_peak_bytes=peak) for peak in (1000, 1100)
    )
    assert missed_budgets(simulated.notes) == (_SAID,)
    assert over_budget(simulated, limit) == over_budget(above, limit) == _SAID
    assert not over_budget(within, limit)
    assert not over_budget(simulated, Limit())
    untold = dataclasses.replace(above, peak_bytes=1000, notes=())
    assert "cannot be met" in over_budget(untold, limit)


def test_a_schedule_above_the_simulation_has_one_more_round() -> None:
    above = Outcome((), (), peak_bytes=100, scheduled_peak_bytes=110, baseline_peak_bytes=200)
    as_simulated = dataclasses.replace(above, scheduled_peak_bytes=102)
    for limit in (Limit(0.0), Limit(0.5), Limit.in_bytes(105)):
        most = dataclasses.replace(limit, share=None, peak_bytes=200)
        assert limit.without_savings(above) == most
        assert limit.without_savings(as_simulated) is None
        assert most.simulated_bytes == 200
    assert Limit.in_bytes(110).without_savings(above) is None  # it is met
    assert Limit().without_savings(above) is None
    without = dataclasses.replace(above, baseline_peak_bytes=None)
    assert Limit(0.0).without_savings(without) is None


def test_of_two_plans_that_of_the_lower_schedule_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[ReadSchedule] = []

    def peak_bytes(reader: ReadSchedule) -> int:
        if not any(reader is known for known in readers):
            readers.append(reader)
        return 100 * _MIB if reader is readers[0] else _MIB

    monkeypatch.setattr(ReadSchedule, "peak_bytes", property(peak_bytes))
    torch.compile(_ADAPTED, backend="mst", options={"memory_budget": 0.0})(_STATES, _TARGET)
    assert len(readers) == 2  # of the leanest plan, and of the one that saves less
    outcome = mstpass.reports()[-1].outcome
    assert outcome.scheduled_peak_bytes == _MIB
    assert outcome.limit_bytes == outcome.baseline_peak_bytes
