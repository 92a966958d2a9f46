"""`mstpass plan --search`: the batch, the length and the plan of the most tokens per second."""

from __future__ import annotations

import dataclasses
import io

import pytest

from mstpass.planner.training import Training

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console

from mstpass.cli.main import main
from mstpass.errors import UserError
from mstpass.graph.gpu_costs import KERNEL_US
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.planner.compiled_step import CompiledStep
from mstpass.planner.models import config_of
from mstpass.planner.plan import plan
from mstpass.planner.request import SEARCHED, Request
from mstpass.planner.terminal_table import show
from mstpass.planner.traced_step import trace
from mstpass.problem.op import CALL
from mstpass.problem.problem import Plan

pytestmark = pytest.mark.usefixtures("one_cublas_workspace")

MIB = 2**20


def request(model, mib, searched=SEARCHED, **rest):
    training = Training(optimizer="sgd", **rest.pop("training", {}))
    return Request(model, training, mib * MIB, 0, alone=True, search=frozenset(searched), **rest)


def test_a_problem_is_scaled_to_another_batch(tiny):
    """Attention's time is in proportion to the sequences, and to the square of their length."""
    traced = trace(config_of(tiny), Training(), 4096, ("free",), multiple=512)
    exact = trace(config_of(tiny), Training(batch=4), 4096, ("free",))

    def step(of, length, batch=None):  # loops are those of the traced tokens
        whole = dataclasses.replace(of.problem_at(length, "free", batch), regions=())
        return CompiledStep(of, whole, Plan(saved))

    without_loops = dataclasses.replace(traced.problem_at(4096, "free"), regions=())
    saved = min_cut(without_loops)
    wanted, found = step(exact, 4096), step(traced, 4096, 4)
    assert found.parts.total == pytest.approx(wanted.parts.total, rel=0.02)
    ops = (*wanted.problem.values, *wanted.problem.backward)
    starts_us = KERNEL_US * sum(op.kind == CALL for op in ops)  # scaling has 4 times as much of it
    assert found.us == pytest.approx(wanted.us + 3 * starts_us, abs=starts_us)
    longer = step(traced, 4 * 4096)
    assert longer.us > 1.1 * found.us
    assert longer.parts.total == pytest.approx(found.parts.total, rel=0.02)


def test_the_fastest_combination_is_planned_in_full(tiny):
    reports = []
    asked = request(tiny, 120)
    found = plan(asked, reports.append)
    best, *others = found.combinations
    assert [c.tokens_per_s for c in found.combinations] == sorted(
        (c.tokens_per_s for c in found.combinations), reverse=True
    )
    assert all(c.total_bytes <= 120 * MIB for c in found.combinations)
    assert len({c.length for c in found.combinations}) == len(others) + 1
    assert (found.request.training.batch, found.own.length) == (best.batch, best.length)
    assert found.own.fits and found.own.total_bytes == pytest.approx(best.total_bytes, rel=0.15)
    speed = found.time.tokens_per_s(found.request.training, best.length)
    assert speed == pytest.approx(best.tokens_per_s, rel=0.15)
    assert "memory_budget=free" in reports
    console = Console(width=100, record=True, file=io.StringIO())
    show(found, console)
    assert "the most tokens per second, of each length" in console.export_text()


def test_what_is_not_searched_stays(tiny):
    found = plan(request(tiny, 120, ("recompute",), length=4096, training={"batch": 2}))
    (only,) = found.combinations
    assert (
        (only.batch, only.length) == (2, 4096) == (found.request.training.batch, found.own.length)
    )


def test_no_combination_fits(tiny):
    with pytest.raises(UserError, match=r"not even 65,536 tokens of one sequence fit"):
        plan(request(tiny, 20, ("batch", "length"), length=65536))


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--search", "batch,depth"], "is not a list of batch, length, recompute"),
        (["--search", "batch"], "needs --sequence"),
        (["--search", "batch,length", "--batch", "2"], "leave out --batch"),
        (["--search", "length", "--plot", "x.png"], "leave out --search"),
        (["--search", "length", "--gpus", "8", "--sequence-parallel"], "--sequence-parallel RANKS"),
    ],
)
def test_wrong_arguments_are_refused(capsys, rest, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "gpt2", "--device-memory", "1GiB", *rest])
    assert stop.value.code == 2 and message in capsys.readouterr().err
