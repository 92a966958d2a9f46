"""Losses that need what is reduced over all tokens: several loops, one after another."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass import pipeline
from mstpass.graph.loop_op import ANY, MAX, MIN, SUM, mst_loop, run_eagerly
from mstpass.measure import peak_bytes
from mstpass.options import Options
from mstpass.problem.problem import MIXED
from tests.checks import check_against_float64, compiled, gradients, joint_graph, kinds
from tests.contrastive_losses import (
    REFUSED,
    TAKEN,
    TOKENS,
    WIDTH,
    Case,
    Pairs,
    balanced,
    clip,
    of_local_rows,
)

pytestmark = [pytest.mark.sampled(5), pytest.mark.op_by_op]

CHUNK = 64
AGAIN = "computed more than once"


def _batches(case: Case, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(rows, WIDTH, device=device) for rows in (TOKENS, case.rows)]


def _step(case: Case):
    return lambda model: lambda x, y: case.loss(model, x, y)


MARKS = {"clip": pytest.mark.kernels, "sinkhorn": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS[n]) if n in MARKS else n for n in TAKEN]
)
def test_loss(name: str, device: str) -> None:
    case = TAKEN[name]
    model = Pairs().to(device)
    report = check_against_float64(model, _step(case), _batches(case, device), chunk_tokens=CHUNK)
    (region,) = report.regions
    assert (region.kind, region.mode, len(region.loops)) == ("lm_head", case.mode, case.loops)
    assert (AGAIN in region.note) == (case.loops > 1)


@pytest.mark.parametrize("name", ["clip", "of local rows", "centred by constants"])
def test_loss_in_bfloat16(name: str, device: str) -> None:
    case = TAKEN[name]
    model = Pairs().to(device, torch.bfloat16)
    batches = [x.bfloat16() for x in _batches(case, device)]
    report = check_against_float64(model, _step(case), batches, chunk_tokens=CHUNK)
    assert kinds(report) == [("lm_head", case.mode)], str(report)


@pytest.mark.parametrize("name", REFUSED)
def test_what_chunks_give_no_part_of_is_refused_by_name(name: str) -> None:
    loss, reason = REFUSED[name]
    case = Case(loss, 0)
    report = check_against_float64(Pairs(), _step(case), _batches(case), chunk_tokens=CHUNK)
    assert not report.regions
    assert any(reason in str(rejection) for rejection in report.rejections), report.rejections


def test_very_many_rounds_are_refused() -> None:
    """They would take long to compile; three times fewer of them run."""
    model = Pairs()
    loss = lambda x, y: balanced(model, x, y, 20)
    report = mstpass.explain(loss, *_batches(Case(clip, 2)), options={"chunk_tokens": CHUNK})
    assert any("more than 16" in str(rejection) for rejection in report.rejections), report


@pytest.mark.kernels
def test_any_number_of_rows_in_one_graph() -> None:
    """The rows of a batch vary; the columns, gathered from all ranks, do not."""
    model, y = Pairs(), torch.randn(256, WIDTH)
    graphs = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model.logits(x, y)
        labels = torch.zeros_like(x[:, 0], dtype=torch.int64) + 7
        return F.cross_entropy(logits, labels) + logits.logsumexp(0).mean()

    run = compiled(step, chunk_tokens=CHUNK)
    for rows in (211, 64, 63, 130, 250):
        x = torch.randn(rows, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        found = gradients(model, run, [x, y])
        for value, reference in zip(found, gradients(model, step, [x, y]), strict=True):
            torch.testing.assert_close(value, reference, atol=2e-6, rtol=2e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]


def test_columns_of_which_some_or_all_logits_are_masked() -> None:
    """Where a chunk, or a column, is -inf, no exponent may be relative to its maximum."""

    def loss(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
        logits = model.logits(x, y)
        rows = torch.arange(x.shape[0])[:, None]
        logits = logits.masked_fill((rows < 70) & (torch.arange(y.shape[0]) < 5), -math.inf)
        sums = logits.masked_fill(torch.arange(y.shape[0]) == 9, -math.inf).logsumexp(0)
        sums = sums.masked_fill(sums == -math.inf, 0.0)
        return F.cross_entropy(logits, torch.arange(x.shape[0]) % 50 + 100) + sums.mean()

    case = Case(loss, 2)
    report = check_against_float64(Pairs(), _step(case), _batches(case), chunk_tokens=CHUNK)
    assert [len(region.loops) for region in report.regions] == [2]


@pytest.mark.parametrize("rows", [13, 64, 211])
def test_the_gradient_of_a_column_s_maximum(rows: int) -> None:
    """It goes to the logits that equal it, which all loops have to compute in the same way."""

    def loss(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
        return torch.log1p(F.relu(model.logits(x, y))).amax(0).square().mean()

    x, y = torch.randn(rows, WIDTH), torch.randn(600, WIDTH)
    step = _step(Case(loss, 2))
    report = check_against_float64(Pairs(), step, [x, y], chunk_tokens=rows // 4)
    assert [region.mode for region in report.regions] == ["fused"]


def test_the_step_may_return_what_ends_a_round() -> None:
    model = Pairs()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits(x, y)
        labels = torch.arange(x.shape[0])
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)
        return loss, logits.detach().amax(0)

    x, y = _batches(Case(clip, 2))
    loss, largest = compiled(step, chunk_tokens=CHUNK)(x, y)
    expected = step(x, y)
    torch.testing.assert_close((loss, largest), expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 31])
def test_parts_of_chunks_are_combined(chunk: int) -> None:
    x = torch.randn(31, 4, dtype=torch.double)
    x[:, 0] = -math.inf
    x[:20, 1] = -math.inf
    num_chunks = -(-31 // chunk)

    def body(rows: Tensor, *valid: Tensor) -> tuple[Tensor, ...]:
        largest = rows.amax(0)
        pivot = torch.where(largest == -math.inf, 0, largest)
        terms = (rows - pivot).exp()
        if valid:
            terms = torch.where(valid[0][:, None], terms, 0)
        return rows.amin(0), largest, terms.sum(0, keepdim=True), (rows > 1).any(0)

    double, shape = torch.double, (4,)
    specs = (
        (MIN, shape, double),
        (MAX, shape, double),
        ((SUM, 1), (1, 4), double),
        (ANY, shape, torch.bool),
    )
    ragged = num_chunks * chunk != 31
    for run in (run_eagerly, mst_loop):
        least, largest, total, found = run(body, num_chunks, chunk, 31, specs, (x,), ())
        torch.testing.assert_close(least, x.amin(0))
        torch.testing.assert_close(largest, x.amax(0))
        torch.testing.assert_close(largest[1:] + total[0, 1:].log(), x[:, 1:].logsumexp(0))
        assert total[0, 0] == 0 and torch.equal(found, (x > 1).any(0)), ragged


def test_no_chunks_give_what_no_tokens_have() -> None:
    specs = ((MAX, (3,), torch.float32), (MIN, (3,), torch.int64), (ANY, (3,), torch.bool))
    largest, least, found = run_eagerly(
        lambda rows, x: (), None, 4, 0, specs, (torch.ones(0, 3),), ()
    )
    assert (largest == -math.inf).all() and (least == torch.iinfo(torch.int64).max).all()
    assert not found.any()


@pytest.mark.kernels
@pytest.mark.full
def test_the_peak_of_a_contrastive_loss() -> None:
    """Beside the towers' rows, there are a chunk's logits and little else."""
    model, batches = Pairs(), [torch.randn(2048, WIDTH) for _ in range(2)]

    def step(fn):
        def run() -> None:
            model.zero_grad(set_to_none=True)
            fn(*batches).backward()

        return run

    loss = lambda x, y: clip(model, x, y)
    plain, ours = step(torch.compile(loss)), step(compiled(loss, memory_budget=0.0))
    plain(), ours()
    assert peak_bytes(ours, "cpu") < 0.1 * peak_bytes(plain, "cpu")


def test_local_rows_need_no_other_ranks() -> None:
    model = Pairs()
    x, y = torch.randn(97, WIDTH), torch.randn(320, WIDTH)
    case = Case(of_local_rows, 2)
    report = check_against_float64(model, _step(case), [x, y], chunk_tokens=32)
    assert [len(region.loops) for region in report.regions] == [2]


def test_values_that_equal_a_maximum_have_no_sections() -> None:
    """A section's product may differ in its last bits from the one whose maximum is known."""

    def has_sections(reduced: Callable[[Tensor], Tensor]) -> bool:
        weight, x = (torch.randn(*size, requires_grad=True) for size in ((3000, 32), (900, 32)))
        module, outputs = joint_graph(lambda x, w: reduced(x @ w.t()).sin().sum(), x, weight)
        options = Options(memory_budget=0.0)
        found = pipeline.run(module, options, num_fwd_outputs=outputs, stop_after="plan").problem
        assert found is not None
        return any(mode.kind == MIXED for region in found.regions for mode in region.modes)

    assert has_sections(lambda logits: logits.logsumexp(-1))
    assert not has_sections(lambda logits: logits.amax(-1))
