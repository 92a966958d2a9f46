"""Sums over chunks in 16 bits: where they are offered, what they save, and how exact they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass import pipeline
from mstpass.limit import Limit
from mstpass.loops.chunk_length import FEW
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.options import Options
from mstpass.partition.solve import solve
from mstpass.partition.solvers.choose_modes import (
    fast_loops,
    least_memory_mode,
    with_narrower_sums,
)
from mstpass.plans import ERROR_IN_16_BITS, FLOAT32, INPUT
from mstpass.problem.problem import FUSED, CutProblem, Loop, LoopResult, Mode, RegionModes, Value
from mstpass.torch_internals.versions import frees_cublas_workspaces
from tests.checks import (
    check_against_float64,
    compiled,
    errors,
    gradients,
    in_float64,
    joint_graph,
)

pytestmark = [pytest.mark.sampled(6), pytest.mark.op_by_op]

BF16 = torch.bfloat16
TOKENS, WIDTH, WORDS = 512, 64, 2000

Make = Callable[[], tuple[nn.Module, Callable[[nn.Module], Callable[..., Tensor]], list[Tensor]]]


def head(dtype: torch.dtype = BF16) -> Any:
    model = nn.Linear(WIDTH, WORDS).to(dtype)
    x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(WORDS, (TOKENS,))
    return model, lambda m: lambda x, y: F.cross_entropy(m(x).float(), y), [x, labels]


def mlp(dtype: torch.dtype = BF16) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
    x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    factor = torch.randn(TOKENS, WIDTH).to(dtype)
    return model.to(dtype), lambda m: lambda x, w: (m(x) * w).float().sum(), [x, factor]


def sums_of(report: mstpass.Report) -> set[str]:
    return {loop.accumulate for region in report.regions for loop in region.loops}


def planned(make: Make, *, dynamic: bool | None = None, **options: Any) -> pipeline.Result:
    model, loss_of, inputs = make()
    joint, outputs = joint_graph(loss_of(model), *inputs, dynamic=dynamic)
    return pipeline.run(joint, Options(**options), num_fwd_outputs=outputs)


def chunks_of(result: pipeline.Result) -> list[str]:
    assert result.problem is not None
    return [mode.chunks for region in result.problem.regions for mode in region.modes]


# ---- errors ------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk_tokens", [TOKENS // 2, 300])
@pytest.mark.parametrize("make", [head, mlp])
def test_two_chunks_are_nearly_as_exact_as_eager(make: Make, chunk_tokens: int) -> None:
    """All gradients of parameters, over three seeds; the loss and that of x have no such sums."""
    mine: list[list[float]] = []
    eagers: list[list[float]] = []
    for seed in range(3):
        torch.manual_seed(seed)
        model, loss_of, inputs = make()
        wide, wide_inputs = in_float64(model, inputs)
        exact = gradients(wide, loss_of(wide), wide_inputs)
        eagers.append(errors(gradients(model, loss_of(model), inputs), exact))
        torch.compiler.reset()
        step = compiled(loss_of(model), chunk_tokens=chunk_tokens)
        mine.append(errors(gradients(model, step, inputs), exact))
        assert sums_of(mstpass.reports()[-1]) == {INPUT}
    for ours, theirs in zip(zip(*mine, strict=True), zip(*eagers, strict=True), strict=True):
        # 3 %: the biases have few elements
        assert sum(ours) <= 1.03 * ERROR_IN_16_BITS * sum(theirs) + 1e-4, (ours, theirs)


@pytest.mark.kernels
def test_under_inductor_as_well() -> None:
    model, loss_of, inputs = head()
    report = check_against_float64(model, loss_of, inputs, chunk_tokens=TOKENS // 2)
    assert sums_of(report) == {INPUT}


# ---- where they are offered --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {"chunk_tokens": TOKENS // 8}),
        (BF16, {"chunk_tokens": TOKENS // 3 + 1}),
        (BF16, {"chunk_tokens": TOKENS // 2, "accumulate": "float32"}),
        (torch.float32, {"chunk_tokens": TOKENS // 2}),
    ],
)
@pytest.mark.parametrize("make", [head, mlp])
def test_they_are_not_offered(
    make: Callable[[torch.dtype], Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """In eight chunks or three, where the user forbids it, and for results in float32."""
    result = planned(lambda: make(dtype), **options)
    assert result.outcome.regions
    assert FEW not in chunks_of(result)
    assert {x.accumulate for r in result.outcome.regions for x in r.loops} == {FLOAT32}


def test_a_symbolic_number_of_chunks_has_no_bound() -> None:
    def dynamic() -> Any:
        model, loss_of, inputs = head()
        for value in inputs:
            torch._dynamo.mark_dynamic(value, 0)
        return model, loss_of, inputs

    result = planned(dynamic, chunk_tokens=TOKENS // 2)
    (region,) = result.outcome.regions
    assert region.symbolic and FEW not in chunks_of(result)


def test_as_input_asks_there_may_be_any_number_of_chunks() -> None:
    result = planned(head, chunk_tokens=TOKENS // 8, accumulate="input")
    (region,) = result.outcome.regions
    assert [loop.accumulate for loop in region.loops] == [INPUT] and region.num_chunks == 8
    assert 'as accumulate="input" asks' in " ".join(str(mstpass.Report(result.outcome)).split())


# ---- memory ------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [head, mlp])
@pytest.mark.parametrize("chunk_tokens", [TOKENS // 2, 300])
def test_plans_are_simulated_as_the_graphs_they_become(
    make: Make, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepSimulation, "lowered_program", StepSimulation.program)
    options = {"chunk_tokens": chunk_tokens, "reconstruct": "off"}
    result = planned(make, **options)
    assert sums_of(mstpass.Report(result.outcome)) == {INPUT}
    assert result.problem is not None and result.modules is not None
    real = simulate_step(*(module.graph for module in result.modules))
    plan, *_ = solve(result.problem, Options(**options), Limit.of(Options()), "")
    found = simulate_plan(result.problem, plan).memory
    assert found.forward.peak.bytes == pytest.approx(real.forward.peak.bytes, rel=0.01)
    # 2 %: the plan counts the scaled gradient of the bias beside its buffer
    assert found.backward.peak.bytes == pytest.approx(real.backward.peak.bytes, rel=0.02)
    wide = planned(make, accumulate="float32", **options).outcome
    assert wide.peak_bytes is not None and result.outcome.peak_bytes is not None
    assert result.outcome.peak_bytes < wide.peak_bytes


def test_a_large_head_on_an_h100_fits_beside_the_gradient_of_its_weight() -> None:
    """8,192 tokens of an 8B model's head: logits as large as a sum in float32."""
    with torch.device("meta"):
        model = nn.Linear(4096, 128_256, bias=False, dtype=BF16)
        x = torch.empty(8192, 4096, dtype=BF16, requires_grad=True)
        labels = torch.empty(8192, dtype=torch.long)

    def report(**options: Any) -> mstpass.Report:
        loss = lambda x, y: F.cross_entropy(model(x).float(), y)
        return mstpass.explain(loss, x, labels, device="cuda", gpu="h100", options=options)

    found = report()
    assert found.outcome.peak_bytes is not None and found.outcome.extra_time is not None
    workspace_mib = 32 if frees_cublas_workspaces() else 0  # else it exists before the step
    assert found.outcome.peak_bytes <= (2070 + workspace_mib) * 2**20
    assert found.outcome.extra_time <= 0
    assert sums_of(found) == {INPUT}
    assert "sums: kept in bfloat16: the error is at most 1.3 times" in str(found)
    assert not report(accumulate="float32").regions, "a sum in float32 saves nothing"


# ---- the choice --------------------------------------------------------------------------------
def _mode(chunks: str, sum_bytes: int, chunk_bytes: int, us: float) -> Mode:
    result = LoopResult("grad", sum_bytes, cast=sum_bytes == 200)  # of 100 bytes in 16 bits
    loop = Loop("mst_loop_grad", ("mm", "grad"), ("x",), (result,), chunk_bytes, us)
    return Mode(FUSED, (loop,), chunks=chunks)


def _region(*modes: Mode) -> tuple[CutProblem, RegionModes]:
    values = (
        Value("x", 8, free=True),
        Value("mm", 400, ("x",), us=10),
        Value("grad", 100, ("mm",), us=10),
    )
    region = RegionModes("mm", (*modes, Mode("whole")))
    return CutProblem(values, outputs=("grad",), regions=(region,)), region


@pytest.mark.parametrize(("chunk_bytes", "us"), [(250, 20.0), (250, 21.0), (310, 20.0)])
def test_narrower_sums_come_first_where_they_cost_neither_memory_nor_time(
    chunk_bytes: int, us: float
) -> None:
    usual, few = _mode("", 200, 200, 20), _mode(FEW, 100, chunk_bytes, us)
    problem, region = _region(usual, few)
    is_better = chunk_bytes == 250 and us <= 20
    assert with_narrower_sums(problem) == ({"mm": few.name} if is_better else {})
    assert least_memory_mode(region) == (few if chunk_bytes == 250 else usual)


def test_where_long_chunks_hold_less_they_are_the_fast_ones() -> None:
    few = _mode(FEW, 100, 400, 20)
    for us, is_near in ((20.1, True), (21.0, False)):
        long = _mode("long chunks", 200, 200, us)
        _, region = _region(few, long)
        assert fast_loops({"mm": 10, "grad": 10}, region) == (long if is_near else few)
