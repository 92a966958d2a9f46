"""Whole models, budgets and modes of Inductor: the loops stay lean, and nothing is refused."""

from __future__ import annotations

import pytest

from tests.cuda import float8
from tests.cuda.checks import check_lean
from tests.cuda.dry_run import dry_run
from tests.cuda.steps import FP32, autocast, blocks, causal_lm, flex_attention, head

pytestmark = pytest.mark.dry_run


@pytest.mark.parametrize(
    ("model", "gpu", "masked", "kernel", "flag"),
    [
        # transformers makes a mask of its own, which is causal
        ("Llama", "a100", False, "_scaled_dot_product_flash_attention.default", ", 0.0, True"),
        ("Llama", "a100", True, "_scaled_dot_product_efficient_attention.default", "scale="),
        ("Llama", "h100", False, "_scaled_dot_product_cudnn_attention.default", "is_causal=True"),
        ("Llama", "h100", True, "_scaled_dot_product_cudnn_attention.default", "scale="),
        ("Mistral", "h100", False, "_flash_attention_forward.default", "window_size_left=4095"),
    ],
)
def test_attention_is_the_gpus_own(
    model: str, gpu: str, masked: bool, kernel: str, flag: str
) -> None:
    pytest.importorskip("transformers")
    run = dry_run(*causal_lm(model, masked), gpu=gpu)
    check_lean(run)
    calls = [line for line in run.text.splitlines() if f"= torch.ops.aten.{kernel}(" in line]
    assert calls and all(flag in call for call in calls)
    assert ("8192, 8192), (" in run.text) == masked  # the shape of a buffer


@pytest.mark.parametrize(
    "budget", ["auto", pytest.param("free", marks=pytest.mark.full), 0.0, "1200MiB"]
)
def test_budgets(budget: object) -> None:
    pytest.importorskip("transformers")
    run = dry_run(*causal_lm("Llama"), memory_budget=budget, strict=False)
    check_lean(run)
    peak, before = run.report.peak_bytes, run.report.outcome.baseline_peak_bytes
    assert peak is not None and before is not None and peak < before


def test_a_mixture_of_experts() -> None:
    pytest.importorskip("transformers")
    run = dry_run(*causal_lm("Mixtral", num_local_experts=4))
    check_lean(run)
    assert "_grouped_mm" in run.text


@pytest.mark.parametrize(
    "mode",
    [
        *("reduce-overhead", "max-autotune"),
        pytest.param("max-autotune-no-cudagraphs", marks=pytest.mark.full),
    ],
)
def test_modes_of_inductor(mode: str) -> None:
    check_lean(dry_run(*head(), mode=mode))


def test_flex_attention() -> None:
    run = dry_run(*flex_attention())
    check_lean(run)
    assert run.report.outcome.save_plan is not None
    assert run.report.outcome.save_plan.solver != "torch"


def test_flex_attention_in_loops_over_heads() -> None:
    run = dry_run(*flex_attention(vocabulary=1024), memory_budget=0.0)
    assert ("attention", "recompute") in {(r.kind, r.mode) for r in run.report.regions}
    check_lean(run)
    templates = [[n for n in loop.kernels if n.startswith("triton_tem")] for loop in run.loops]
    assert sorted(map(len, templates)) == [1, 2]  # forward, and forward and backward


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_blocks(gpu: str) -> None:
    """Attention of a chunk is told its first row from the host: no loop waits for the GPU."""
    run = dry_run(*blocks(), gpu=gpu, memory_budget=0.0, chunk="blocks", chunk_tokens=1024)
    assert [region.kind for region in run.report.regions].count("block") == 2
    check_lean(run)
    assert "mstpass.attend_rows." in run.text and "add_attend_rows_backward_" in run.text


def test_a_kernel_of_the_users() -> None:
    from tests.cuda import triton_step

    run = dry_run(*triton_step.step())
    check_lean(run)
    assert "_double" in run.text


def test_autocast() -> None:
    run = dry_run(*autocast(head(dtype=FP32)))
    check_lean(run)
    assert run.accumulators


def test_float8_products_scaled_by_row_run_in_chunks() -> None:
    run = dry_run(*float8.mlp(by_row=True), memory_budget=0.0)
    check_lean(run)
    assert all("extern_kernels._scaled_mm" in loop.calls for loop in run.loops)


def test_a_scale_of_all_tokens_ends_a_round() -> None:
    run = dry_run(*float8.mlp(by_row=False), memory_budget=0.0)
    (region,) = run.report.regions
    assert "computed more than once" in region.note
    assert any(output.combine == "max" for loop in region.loops for output in loop.outputs)
