"""What Inductor writes for a GPU: the loops wait for nothing and make nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda.checks import check_lean
from tests.cuda.dry_run import dry_run
from tests.cuda.steps import FP16, FP32, Step, head, mlp_in_sections, mlps

pytestmark = pytest.mark.dry_run

STEPS: dict[str, tuple[Callable[[], Step], dict[str, Any]]] = {
    "head": (lambda: head(), {}),
    "head, fp16": (lambda: head(dtype=FP16), {"free_overhead": 1.0}),
    "head, fp32": (lambda: head(dtype=FP32), {}),
    "head, odd vocabulary": (lambda: head(vocabulary=50257), {}),
    "head, odd number of tokens": (lambda: head(8191), {}),
    "head, sections of an odd vocabulary": (
        lambda: head(1024, vocabulary=50257),
        {"memory_budget": 0.0},
    ),
    "swiglu": (lambda: mlps("swiglu"), {"memory_budget": 0.0}),
    "swiglu, chunks": (lambda: mlps("swiglu"), {"chunk_tokens": 1024}),
    "gelu": (lambda: mlps("gelu"), {"memory_budget": 0.0}),
    "gelu, fp32": (lambda: mlps("gelu", dtype=FP32), {"memory_budget": 0.0}),
}


@pytest.mark.parametrize("hidden", [8192, 8001])
def test_sections_of_an_mlp_write_gradients_in_place(hidden: int) -> None:
    """No buffer of a weight's shape is made but its gradient."""
    run = dry_run(*mlp_in_sections(hidden=hidden), memory_budget=0.0)
    check_lean(run)
    assert [region.mode for region in run.report.regions] == ["mixed"]
    peak = run.report.outcome.scheduled_peak_bytes
    assert run.report.outcome.peak_bytes == pytest.approx(peak, rel=0.05)
    _, sections = run.loops
    assert sections.sums == 1  # gate's and up's at once
    for shape in ((hidden, 2048), (2048, hidden)):
        count = run.text.count(f"empty_strided_cuda({shape}, ")
        assert count == (2 if shape[0] == hidden else 1)  # gate and up; down


@pytest.mark.parametrize("name", STEPS)
def test_a_loop_is_lean(name: str) -> None:
    step, options = STEPS[name]
    check_lean(dry_run(*step(), **options))


def test_sums_in_16_bits_are_added_up_in_place() -> None:
    """No buffer of the weight's shape is made but the gradient itself; nothing is cast."""
    weight = "empty_strided_cuda((128256, 1024), (1024, 1), {})"
    for accumulate, dtype in (("auto", "torch.bfloat16"), ("float32", "torch.float32")):
        run = dry_run(*head(), accumulate=accumulate)
        check_lean(run)
        (region,) = run.report.regions
        assert region.num_chunks == 2
        assert run.text.count(weight.format(dtype)) == 1
        (loop,) = run.loops
        assert loop.sums == 1
        if accumulate == "auto":
            assert weight.format("torch.float32") not in run.text


def test_symbolic_lengths_fuse_as_static_ones_do() -> None:
    static = dry_run(*head())
    symbolic = dry_run(*head(), dynamic_dim=0)
    check_lean(symbolic)
    assert symbolic.report.outcome.peaks, "it has a plan for each range of lengths"
    (one,), (other,) = static.loops, symbolic.loops
    assert 0 < len(other.kernels) <= len(one.kernels)
    assert other.calls == one.calls or len(other.calls) == len(one.calls) + 1  # its length


@pytest.mark.parametrize("budget", ["free", 0.0, 600 * 2**20])
def test_a_head_of_any_length_keeps_its_loops(budget: str | float) -> None:
    """Compiled as a user's call is: planned for a range, in rounds where a budget asks for them."""
    report = dry_run(*head(vocabulary=50257), dynamic=True, memory_budget=budget).report
    assert [region.kind for region in report.regions] == ["lm_head"] and report.regions[0].loops
    assert report.outcome.peaks and report.outcome.scheduled_peak_bytes


def test_padding_changes_no_region() -> None:
    """Inductor would pad this vocabulary, and a padded head is no region."""
    step = head(vocabulary=50257)
    regions = dry_run(*step).report.regions
    assert dry_run(*step, padding_pays=True).report.regions == regions
    asked = dry_run(*step, padding_pays=True, inductor={"shape_padding": True})
    assert asked.report.regions != regions


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_every_kernel_compiles(gpu: str) -> None:
    run = dry_run(*head(8191, vocabulary=50257), gpu=gpu, kernels=True)
    assert not run.code.failures
    assert len(run.code.binaries) >= 4 and all(run.code.binaries.values())
