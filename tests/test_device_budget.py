"""The budget "auto" on a CUDA device: the free plan where it fits, else what is left there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import mstpass
from mstpass import backend, captured
from mstpass.explainer import plan_step
from mstpass.graph.graph_text import graph_text
from mstpass.memory import device_budget
from mstpass.options import Options
from mstpass.torch_internals import collectives
from tests.checks import joint_graph

GIB = 2**30


# ---- what the device has left ------------------------------------------------------------------
Budget = Callable[..., int | None]


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    """The budget under options, for a device of 80 GiB and a graph that has a GiB of states."""
    parameter = torch.nn.Parameter(torch.zeros(GIB // 8, device="meta"))

    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)

    inputs = [torch.zeros(1).as_subclass(OnCuda), parameter]
    monkeypatch.setattr(device_budget, "_optimizers_that_stepped", set())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * GIB)

    def of(free_gib: float, total_bytes: int = 80 * GIB, **given: Any) -> int | None:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _: (int(free_gib * GIB), total_bytes)
        )
        return device_budget.device_budget_bytes(Options.parse(given, environ={}), inputs)

    return of


def test_it_is_a_step_below_what_is_free_less_a_reserve(budget: Budget) -> None:
    steps = [int(80 * GIB / 2 ** (i / 4)) for i in range(20)]
    for free_gib in (75, 60, 40, 10, 5):
        left = (free_gib + 2 - 1) * GIB  # 2 are cached, 1 is for the states to come
        found = budget(free_gib)
        assert found in steps and 0.79 * left < found <= 0.95 * left
    assert budget(40, reserve="20GiB") == budget(20, reserve=0)
    assert budget(10, reserve=2**40) == 1, "nothing left: the least memory, with a warning"


def test_the_states_of_an_optimizer_that_stepped_are_there(budget: Budget) -> None:
    before = budget(3)
    device_budget._optimizers_that_stepped.add("Adam")
    after = budget(3)
    assert before is not None and after is not None and before < after


def test_ranks_whose_devices_differ_by_some_percent_agree(budget: Budget) -> None:
    found = {budget(free_gib, 80 * GIB - some) for some in (0, 2**24) for free_gib in (71, 73, 75)}
    assert len(found) == 1


@pytest.mark.parametrize("memory_budget", ["free", 0.0, "2GiB", 2**30])
def test_no_other_budget_asks_the_device(budget: Budget, memory_budget: Any) -> None:
    assert budget(40, memory_budget=memory_budget) is None
    assert device_budget.device_budget_bytes(Options(), [torch.zeros(1)]) is None


def test_an_optimizers_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_budget, "_optimizers_that_stepped", set())
    device_budget.watch_optimizers()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    assert device_budget._optimizers_that_stepped == {"SGD"}


# ---- which plan it leads to ----------------------------------------------------------------------
def _loss(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + F.gelu(x @ up) @ down
    return torch.logsumexp(x.square().sum(-1), 0)


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(n, m, requires_grad=True) for n, m in ((1024, 32), (32, 256), (256, 32))]


_SIZES = itertools.count(1)


class _Compiler:
    """In the place of Inductor: it calls the partitioner, and keeps the key and the graphs."""

    def __init__(self) -> None:
        self.joint, self.outputs = joint_graph(_loss, *_inputs())
        self.inputs = [torch.zeros(next(_SIZES))]  # of a graph that no other test has
        self.keys: list[str | None] = []
        self.graphs: list[tuple[str, ...]] = []
        self.free_plan_needs: int | None = None  # bytes, by the schedule
        self.scheduled_bytes: int | None = None

    def __call__(self, gm: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        partitioner = config_patches["custom_partitioner_fn"]
        modules = partitioner(self.joint, [], num_fwd_outputs=self.outputs)
        self.scheduled_bytes = self.free_plan_needs if partitioner.limit.is_free else None
        self.keys.append(partitioner.uuid())
        self.graphs.append(tuple(map(graph_text, modules)))
        return gm.forward

    def compile(self, **options: Any) -> mstpass.Report:
        before = len(mstpass.reports())
        backend.mst(fx.symbolic_trace(lambda x: x.sin()), self.inputs, options=options)
        (report,) = mstpass.reports()[before:]
        return report


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> _Compiler:
    made = _Compiler()
    monkeypatch.setattr(backend, "compile_fx", made)
    monkeypatch.setattr(backend, "check_calls", lambda *_: None)  # it lowers no loops
    monkeypatch.setattr(
        backend.ReadSchedule, "peak_bytes", property(lambda _: made.scheduled_bytes)
    )
    return made


def _leaves(monkeypatch: pytest.MonkeyPatch, left_bytes: int) -> None:
    for module in (backend, plan_step):
        monkeypatch.setattr(
            module,
            "device_budget_bytes",
            lambda options, _: left_bytes if options.memory_budget == "auto" else None,
        )


def test_with_room_to_spare_it_is_the_free_plan(
    compiler: _Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leaves(monkeypatch, 140 * GIB)
    compiler.compile()
    compiler.compile(memory_budget="free")
    assert compiler.graphs[0] == compiler.graphs[1]
    assert compiler.keys[0] == compiler.keys[1], "one entry of the compile caches serves both"


@pytest.mark.parametrize("by", ["simulation", "schedule"])
def test_where_the_free_plan_does_not_fit_it_is_a_budget_in_bytes(
    by: str, compiler: _Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak_bytes = _peak_bytes(memory_budget="free")
    left_bytes = peak_bytes if by == "simulation" else 2 * peak_bytes
    if by == "schedule":
        compiler.free_plan_needs = left_bytes + 1
    _leaves(monkeypatch, left_bytes)
    compiler.compile()
    compiler.compile(memory_budget=left_bytes)
    tried = ["free"] if by == "schedule" else []  # the simulation needs no compilation
    assert len(compiler.graphs) == len(tried) + 2
    assert compiler.graphs[-2] == compiler.graphs[-1]
    compiler.compile()
    assert len(compiler.graphs) == len(tried) + 3, "that the free plan does not fit is remembered"


def test_an_abandoned_plan_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same under Inductor: one report, and gradients as in eager."""
    inputs = _inputs()
    options = {"strict": True, "chunk": "off"}
    _leaves(monkeypatch, _peak_bytes(memory_budget="free", **options))
    before = len(mstpass.reports())
    loss = torch.compile(_loss, backend="mst", options=options)(*inputs)
    (report,) = mstpass.reports()[before:]
    assert report.outcome.limit_bytes is not None
    found = torch.autograd.grad(loss, inputs)
    expected = torch.autograd.grad(_loss(*inputs), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected[0].std()))


def test_explain_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    peak_bytes = _peak_bytes(memory_budget="free")
    _leaves(monkeypatch, 2 * peak_bytes)
    assert _peak_bytes() == peak_bytes
    _leaves(monkeypatch, peak_bytes)
    assert _peak_bytes() == _peak_bytes(memory_budget=peak_bytes) < peak_bytes


def _peak_bytes(**options: Any) -> int:
    found = mstpass.explain(_loss, *_inputs(), options=options).peak_bytes
    assert found is not None
    return found


# ---- several ranks -------------------------------------------------------------------------------
def test_without_ranks_nobody_is_asked() -> None:
    assert collectives.least_of_ranks(7) == (7, "")


def test_the_least_of_the_ranks_is_what_counts(
    compiler: _Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leaves(monkeypatch, 140 * GIB)
    monkeypatch.setattr(captured, "least_of_ranks", lambda number: (123 * 2**10, ""))
    compiler.inputs = [x.requires_grad_() for x in compiler.inputs]  # evaluation asks nobody
    with pytest.warns(UserWarning, match="memory_budget=123.0 KiB cannot be met"):
        compiler.compile()
