"""Copies to the host and back in code generated for a GPU: torch's own ops, in order."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mstpass.bench.models import LlamaSize, llama
from mstpass.partition import build_problem
from tests.checks import errors, gradients, in_float64, rms
from tests.cuda.checks import check_lean
from tests.cuda.dry_run import DryRun, dry_run
from tests.cuda.generated_code import loops_of
from tests.cuda.interpret import run_interpreted
from tests.cuda.steps import blocks

pytestmark = pytest.mark.dry_run

SIZE = LlamaSize(256, 4, 4, 704, 500, 2048)
_COPY_ROWS = "torch.ops.mstpass.copy_rows.default"
_CALL = re.compile(r"(\w+) = torch\.ops\.\w+\.(offload|reload|wait_tensor)\.default\((.*)\)$")


@dataclasses.dataclass(frozen=True)
class Call:
    line: int
    result: str
    op: str
    operands: tuple[str, ...]


def _calls(code: str) -> list[Call]:
    found = []
    for i, line in enumerate(code.splitlines()):
        if match := _CALL.search(line.strip()):
            found.append(Call(i, match[1], match[2], tuple(match[3].split(", "))))
    return found


@pytest.fixture(scope="module")
def run() -> DryRun:
    model, ids, target = llama(SIZE, torch.device("meta"))
    model = model.to(torch.bfloat16)
    return dry_run(
        lambda ids, target: model(ids, target), [ids, target],
        memory_budget=0.3, host_budget="1GiB",
    )  # fmt: skip


def _codes(run: DryRun) -> tuple[str, str]:
    def of(phase: str) -> str:
        (code,) = (c for c in run.code.modules if f"_{phase}" in c.splitlines()[0])
        return code

    return of("forward"), of("backward")


def test_each_value_is_freed_behind_the_wait_for_its_copy(run: DryRun) -> None:
    forward, _ = _codes(run)
    lines, calls = forward.splitlines(), _calls(forward)
    plan = run.report.outcome.save_plan
    assert plan is not None and not run.code.failures
    offloads = [call for call in calls if call.op == "offload"]
    waits = [call for call in calls if call.op == "wait_tensor"]
    assert len(offloads) == len(waits) == sum(v.on_host for v in plan.saved) > 0
    for call in offloads:
        (source,) = call.operands
        (wait,) = (w for w in waits if w.operands[1] == source)
        deleted = [i for i, line in enumerate(lines) if line.strip() == f"del {source}"]
        assert call.line < wait.line < deleted[0]
    between = [lines[a.line : b.line] for a, b in zip(offloads, waits, strict=True)]
    assert any("extern_kernels" in line for text in between for line in text)  # not at once


def test_values_are_back_before_they_are_read(run: DryRun) -> None:
    _, backward = _codes(run)
    lines, calls = backward.splitlines(), _calls(backward)
    reloads = [call for call in calls if call.op == "reload"]
    assert len(reloads) >= len({call.operands[0] for call in reloads}) > 0
    between = lines[reloads[0].line : reloads[-1].line]
    assert sum("extern_kernels" in line for line in between) > 10  # not all at the start
    assert not any("assumed to be not aligned" in lines[call.line + d] for call in reloads
                   for d in range(1, 6))  # fmt: skip


def test_the_schedule_needs_what_was_simulated(run: DryRun) -> None:
    outcome = run.report.outcome
    assert outcome.peak_bytes is not None and outcome.scheduled_peak_bytes is not None
    assert outcome.scheduled_peak_bytes == pytest.approx(outcome.peak_bytes, rel=0.1)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_the_generated_code_computes_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels interpreted on the CPU; each copy happens at the last moment."""
    monkeypatch.setattr(build_problem, "LEAST_OFFLOADED_BYTES", 1)
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(64, 32, requires_grad=True)
    options = {"memory_budget": 0.0, "host_budget": "1GiB", "chunk": "off"}
    run = dry_run(lambda x: model(x), [x], **options)
    assert run.report.outcome.save_plan is not None
    assert run.report.outcome.save_plan.host_bytes
    assert len(_calls(_codes(run)[1])) > 4
    (loss,), given = run_interpreted(run, tmp_path)
    found = {id(p): g for p, g in zip(run.primals, given, strict=False) if g is not None}
    ours = [loss, *(found[id(p)] for p in (*model.parameters(), x))]
    wide, (wide_x,) = in_float64(model, [x])
    exact, eager = gradients(wide, wide, [wide_x]), gradients(model, model, [x])
    assert rms(errors(ours, exact)) <= 1.1 * rms(errors(eager, exact)) + 1e-6


# ---- rows of a chunk -----------------------------------------------------------------------------
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_loops_copy_the_rows_of_a_chunk_without_a_wait(gpu: str) -> None:
    options = {"chunk": "blocks", "chunk_tokens": 1024, "memory_budget": 0.0}
    run = dry_run(*blocks(), gpu=gpu, host_budget="1GiB", **options)
    check_lean(run)
    plan = run.report.outcome.save_plan
    assert plan is not None and any(value.by_chunk for value in plan.saved)
    forward, backward = _codes(run)
    copying = [loop for loop in loops_of(backward) if _COPY_ROWS in loop.calls]
    assert len(copying) >= 2  # both rounds of a block's backward
    assert not any(loop.syncs for loop in copying)
    assert _COPY_ROWS not in forward and "rows_on_host" not in run.text
    on_host = {value.node for value in plan.saved if value.by_chunk}
    reloaded = {call.operands[0] for call in _calls(backward) if call.op == "reload"}
    assert on_host - reloaded  # no whole copy of these
    lines = backward.splitlines()
    copies = [i for i, line in enumerate(lines) if f"= {_COPY_ROWS}(" in line]
    assert not any("assumed to be not aligned" in line for i in copies for line in lines[i : i + 8])
