"""Values on the host of which loops of the backward copy rows, emulated on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import mstpass
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.partition.solvers import offload
from mstpass.partition.solvers.candidate import Candidate
from mstpass.partition.solvers.peak_search import _with_offloading, peak_search
from mstpass.problem.op import CALL, INPUT, VIEW
from mstpass.problem.problem import MAY_OFFLOAD, CutProblem, Host, Plan, Value
from mstpass.problem.saved_set import InvalidPlan, checked_plan
from tests.attention_models import WIDTH
from tests.checks import check_against_float64, compiled
from tests.host_on_cpu import host_on_cpu
from tests.test_blocks import LLAMA, MLP, Model

LEAST: dict[str, Any] = {"memory_budget": 0.0, "host_budget": "1GiB"}


def _loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x)


def _by_chunk(report: mstpass.Report) -> int:
    plan = report.outcome.save_plan
    assert plan is not None
    return sum(value.by_chunk for value in plan.saved)


# ---- gradients -----------------------------------------------------------------------------------
@pytest.mark.op_by_op
@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        pytest.param(1, 2048, id="one sequence"),
        pytest.param(1, 2000, id="a last chunk that overlaps"),
        pytest.param(2, 1000, id="chunks that cross sequences"),
    ],
)
def test_gradients_of_blocks(batch: int, tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, WIDTH, requires_grad=True)
    options = {**LEAST, "chunk": "blocks", "chunk_tokens": 128}
    with host_on_cpu() as copies:
        report = check_against_float64(Model(LLAMA), _loss_of, [x], **options)
    assert _by_chunk(report) and copies.rows
    assert [region.kind for region in report.regions].count("block") == 2


class MLPs(nn.Module):
    """With an op that mixes tokens in front of each, so that each has loops of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + F.softmax(x, 1))
        return x.square().mean()


@pytest.fixture
def all_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values that may wait on the host do, and loops copy the rows of all of them."""
    monkeypatch.setattr(offload, "ways", lambda candidate: (True,))
    monkeypatch.setattr(offload, "_least", lambda most, accepted: most)


@pytest.mark.op_by_op
@pytest.mark.kernels
@pytest.mark.usefixtures("all_by_chunk")
def test_gradients_where_the_length_is_symbolic() -> None:
    torch.manual_seed(0)
    model = MLPs()
    with host_on_cpu() as copies:
        step = compiled(_loss_of(model), **LEAST, chunk_tokens=256)
        for tokens in (2048, 1999):  # a second length, which no chunk divides
            x = torch.randn(1, tokens, WIDTH, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 1)
            before = copies.rows
            step(x).backward()
            ours = [x.grad, *(p.grad for p in model.parameters())]
            x.grad = None
            model.zero_grad()
            model(x).backward()
            for mine, p in zip(ours, (x, *model.parameters()), strict=True):
                torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-7)
            model.zero_grad()
            assert copies.rows > before


@pytest.mark.op_by_op
@pytest.mark.usefixtures("all_by_chunk")
def test_a_second_backward_over_the_same_graph() -> None:
    torch.manual_seed(0)
    model, x = MLPs(), torch.randn(1, 2048, WIDTH)
    with host_on_cpu() as copies, functorch_config.patch(donated_buffer=False):
        loss = compiled(_loss_of(model), **LEAST, chunk_tokens=128)(x)
        grads, rows = [], []
        for _ in range(2):
            grads.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            rows.append(copies.rows)
    assert rows[1] == 2 * rows[0] > 0
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.usefixtures("all_by_chunk")
def test_the_report_counts_them() -> None:
    x = torch.randn(1, 2048, WIDTH)
    with host_on_cpu():
        options = {**LEAST, "chunk_tokens": 128}
        report = mstpass.explain(_loss_of(MLPs()), x, options=options)
    count = _by_chunk(report)
    assert count and f"of {count} of them, loops copy the rows of a chunk" in str(report)


# ---- simulation ----------------------------------------------------------------------------------
LAYERS, BYTES, CHUNK, US = 6, 1024, 32, 10.0
ALL = frozenset(f"x{i}" for i in range(1, LAYERS + 1))


def _chain(speed: float = BYTES, others: int = 0) -> CutProblem:
    """Layers whose values loops of the backward read in rows, by way of views.

    Args:
        speed: the bytes that a copy moves in the time of one op.
        others: of how many values another op reads all of it.
    """
    values = [Value("x0", BYTES, kind=INPUT, free=True)]
    for i in range(1, LAYERS + 1):
        x = Value(f"x{i}", BYTES, (f"x{i - 1}",), CALL, us=US, heavy=True, needed=True)
        values += [
            dataclasses.replace(x, offload=MAY_OFFLOAD),
            Value(f"rows{i}", BYTES, (x.name,), VIEW, savable=False, needed=True),
        ]
    values.append(Value("loss", 8, (f"x{LAYERS}",), CALL, us=US, heavy=True))
    backward = [Value("t", 8, kind=INPUT)]
    for i in range(LAYERS, 0, -1):
        before = backward[-1].name
        if i <= others:
            backward.append(Value(f"whole{i}", 8, (before, f"x{i}"), CALL, us=US))
            before = f"whole{i}"
        in_rows = ((f"rows{i}", CHUNK),)
        loop = Value(f"mst_loop_g{i}", 0, (before, f"rows{i}"), CALL, 8, us=US, in_rows=in_rows)
        backward += [loop, Value(f"g{i}", 2 * BYTES, (loop.name,), CALL)]
    return CutProblem(
        tuple(values),
        backward=tuple(backward),
        outputs=("loss",),
        gradients=(backward[-1].name,),
        host=Host(2**30, speed / US, speed / US),
    )


def _at(step: StepSimulation) -> dict[str, int]:
    return {moment.node: moment.bytes for moment in step.backward.moments}


def test_a_loop_needs_the_rows_of_a_chunk_and_the_time_of_the_copies() -> None:
    problem = _chain()
    whole = StepSimulation(problem, ALL, offloaded=ALL)
    rows = StepSimulation(problem, ALL, offloaded=ALL, by_chunk=ALL)
    held_bytes = 2 * BYTES + 8  # the gradient that it reads, and the loss
    assert _at(rows)["mst_loop_g1"] == held_bytes + 8 + CHUNK
    assert _at(whole)["mst_loop_g1"] >= held_bytes + 8 + BYTES
    assert rows.peak_bytes < whole.peak_bytes
    assert not any(op.name.endswith(":reload") for op in rows.program.backward)
    backward_us = sum(op.us for op in rows.program.backward)
    assert backward_us == sum(op.us for op in whole.program.backward) + LAYERS * US
    assert not rows.program.reloads


def test_what_reads_all_of_a_value_reads_a_copy_of_it() -> None:
    step = StepSimulation(_chain(others=1), ALL, offloaded=ALL, by_chunk=ALL)
    ops = {op.name: op for op in step.program.backward}
    assert ops["whole1"].inputs == ("g2", "x1") and ops["x1"].inputs == ("x1:reload",)
    assert ops["mst_loop_g1"].inputs == ("whole1", "rows1:rows")
    assert "rows1" not in ops  # nothing reads the view of the copy
    assert [copy.name for copy in step.program.reloads] == ["x1"]


def test_values_come_back_by_chunk_where_a_budget_asks_for_it() -> None:
    problem = _chain(speed=4 * BYTES)
    every = {w: StepSimulation(problem, ALL, offloaded=ALL, by_chunk=w) for w in (ALL, frozenset())}
    lean, whole = every[ALL].peak_bytes, every[frozenset()].peak_bytes
    assert lean < whole
    assert not peak_search(problem, whole).by_chunk
    found = peak_search(problem, lean)
    assert found.by_chunk and found.by_chunk <= found.offloaded
    assert simulate_plan(problem, found).peak_bytes <= lean
    assert simulate_plan(problem, peak_search(problem, 0)).peak_bytes <= lean


@pytest.mark.parametrize("count", [1, 2, 8, 20])
def test_the_last_plan_of_a_sequence_is_looked_at(count: int) -> None:
    """It keeps the least on the device, and may be the only one that is within the budget."""
    problem = _chain()
    without_host = Candidate(dataclasses.replace(problem, host=None), Plan(ALL))
    last = Candidate(problem, Plan(ALL))
    lean_bytes = offload.all_offloaded(last, by_chunk=True).peak_bytes
    found = list(_with_offloading([*[without_host] * (count - 1), last], lean_bytes))
    assert [candidate.peak_bytes for candidate in found] == [lean_bytes]


def test_only_values_on_the_host_have_rows_there() -> None:
    with pytest.raises(InvalidPlan, match="not offloaded"):
        checked_plan(_chain(), Plan(ALL, by_chunk=ALL))
