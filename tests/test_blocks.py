"""Blocks: attention and the MLP behind it in loops over chunks of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.graph.joint import JointGraph
from mstpass.regions.blocks import LEAVES, NO_MLP, NO_RESIDUAL, detect_blocks
from mstpass.regions.detect import find_regions
from tests.attention_models import WIDTH, Form, Layer
from tests.checks import check_against_float64, check_batches, joint_graph, kinds

pytestmark = pytest.mark.op_by_op

WORDS, LAYERS = 600, 2
LLAMA = Form(kv_heads=2, rope="halves", mask="causal", shared_kv=True)
FULL = dataclasses.replace(LLAMA, mask="")
WINDOW = dataclasses.replace(LLAMA, mask="window")  # of 8 keys, as a mask on a CPU
LEAST: dict[str, Any] = {"memory_budget": 0.0, "chunk": "blocks"}


class MLP(nn.Module):
    """A gated MLP behind a norm, and a residual around both."""

    def __init__(self, width: int = 4 * WIDTH):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, form: Form, layers: int = LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Layer(form), MLP()) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, torch.arange(len(logits)) * 7 % WORDS)


def _loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x)


def _inputs(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(batch, tokens, WIDTH, dtype=dtype).requires_grad_()]


def _check(form: Form, batch: int, tokens: int, **options: Any) -> mstpass.Report:
    torch.manual_seed(0)
    dtype, layers = options.pop("dtype", torch.float32), options.pop("layers", LAYERS)
    model = Model(form, layers).to(dtype)
    given = {**LEAST, "inductor": {"fx_graph_cache": False}, **options}
    report = check_against_float64(model, _loss_of, _inputs(batch, tokens, dtype), **given)
    assert [kind for kind, _ in kinds(report)].count("block") == layers, str(report)
    return report


# ---- gradients -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("form", "batch", "tokens", "chunk"),
    [
        pytest.param(LLAMA, 1, 256, 64, id="grouped queries"),
        pytest.param(LLAMA, 2, 128, 64, id="sequences"),
        pytest.param(LLAMA, 2, 100, 64, id="chunks that cross sequences"),
        pytest.param(Form(rope="pairs", mask="causal"), 1, 256, 64, id="a key for each query"),
        pytest.param(FULL, 2, 128, 64, id="full"),
        pytest.param(
            dataclasses.replace(LLAMA, norm="head", bias=True), 1, 256, 64, id="norms and biases"
        ),
        pytest.param(
            dataclasses.replace(LLAMA, shared_kv=False), 1, 256, 64, id="keys that are repeated"
        ),
        pytest.param(
            Form(mask="causal", fused="sections", rope="halves"), 1, 256, 64, id="in sections"
        ),
    ],
)
def test_gradients_are_right(form: Form, batch: int, tokens: int, chunk: int) -> None:
    _check(form, batch, tokens, chunk_tokens=chunk)


def test_gradients_are_right_in_16_bits() -> None:
    plain = dataclasses.replace(LLAMA, rope="")
    _check(plain, 1, 1024, chunk_tokens=128, dtype=torch.bfloat16)


@pytest.mark.parametrize("chunk", [pytest.param(4, marks=pytest.mark.full), 16])
def test_gradients_of_a_mask_are_right(chunk: int) -> None:
    """A chunk is shorter than the window, or longer."""
    _check(WINDOW, 1, 64, chunk_tokens=chunk, layers=1)


def test_a_mask_has_no_chunks_that_overlap() -> None:
    torch.manual_seed(0)
    inputs, options = _inputs(1, 64), {**LEAST, "chunk_tokens": 24}
    report = mstpass.explain(Model(WINDOW, layers=1), *inputs, options=options)
    assert "block" not in [kind for kind, _ in kinds(report)]
    assert any("24 queries, which attention with a mask" in r.reason for r in report.rejections)


# ---- symbolic sizes ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("form", "shapes", "chunk", "marked"),
    [
        # fewer tokens than a chunk, as many, one more, and one behind the last whole chunk
        pytest.param(LLAMA, [(1, 257), (1, 33), (1, 64), (1, 65)], 64, (1,), id="tokens"),
        pytest.param(  # those of the kernels below
            LLAMA,
            [(2, 100), (2, 37)],
            48,
            (1,),
            id="tokens of two sequences",
            marks=pytest.mark.full,
        ),
        pytest.param(LLAMA, [(3, 100), (2, 100)], 48, (0,), id="sequences"),
        pytest.param(LLAMA, [(3, 128), (2, 50)], 48, (0, 1), id="both"),
        pytest.param(
            dataclasses.replace(LLAMA, mask=""), [(3, 70), (2, 33)], 48, (0, 1), id="full"
        ),
        pytest.param(
            dataclasses.replace(LLAMA, norm="head", bias=True, shared_kv=False),
            [(1, 100), (1, 37)],
            48,
            (1,),
            id="norms, and keys that are repeated",
        ),
        pytest.param(WINDOW, [(1, 100), (1, 37)], 48, (1,), id="a mask, long chunks"),
        pytest.param(WINDOW, [(1, 30), (1, 17)], 5, (1,), id="a mask, short chunks"),
    ],
)
def test_gradients_are_right_at_any_length(
    form: Form, shapes: list[tuple[int, int]], chunk: int, marked: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    batches = [_inputs(*shape) for shape in shapes]
    for batch in batches:
        torch._dynamo.mark_dynamic(batch[0], marked)
    options = {**LEAST, "chunk_tokens": chunk, "inductor": {"fx_graph_cache": False}}
    reports = check_batches(Model(form, layers=1), _loss_of, batches, **options)
    for report in reports:
        blocks = [region for region in report.regions if region.kind == "block"]
        assert [region.symbolic for region in blocks] == [True], str(report)


def test_gradients_are_right_at_any_length_in_16_bits() -> None:
    torch.manual_seed(0)
    model = Model(dataclasses.replace(LLAMA, rope=""), layers=1).to(torch.bfloat16)
    (x,) = _inputs(2, 500, torch.bfloat16)
    torch._dynamo.mark_dynamic(x, (0, 1))
    report = check_against_float64(model, _loss_of, [x], **LEAST, chunk_tokens=128)
    assert ("block", True) in [(region.kind, region.symbolic) for region in report.regions]


def _few_kernels() -> nn.Module:
    """A block without rotations, whose loss mixes tokens; with a head it has twice the kernels."""
    return nn.Sequential(Layer(dataclasses.replace(LLAMA, rope="")), MLP())


def _mixed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).cumsum(1).square().mean()


@pytest.mark.kernels
def test_gradients_are_right_at_any_length_in_kernels() -> None:
    torch.manual_seed(0)
    batches = [_inputs(2, 100), _inputs(2, 37)]
    for (x,) in batches:
        torch._dynamo.mark_dynamic(x, 1)
    options = {**LEAST, "chunk_tokens": 48}
    (report,) = check_batches(_few_kernels(), _mixed, batches, **options)
    assert ("block", True) in [(region.kind, region.symbolic) for region in report.regions]


# ---- one buffer for the gradient of the residual stream -----------------------------------------
def _written_over(report: mstpass.Report) -> list[int]:
    """How many results of each block are written over an operand."""
    blocks = [region for region in report.regions if region.kind == "block"]
    return [sum(bool(x.over) for loop in block.loops for x in loop.outputs) for block in blocks]


def test_gradients_are_written_over_each_other() -> None:
    """Those of a block's output, and of its input in part and as a whole; chunks overlap."""
    report = _check(LLAMA, 1, 250, chunk_tokens=64)
    assert _written_over(report) == [2, 2]


@pytest.mark.kernels
def test_gradients_are_written_over_each_other_in_kernels() -> None:
    torch.manual_seed(0)
    options = {**LEAST, "chunk_tokens": 64}
    report = check_against_float64(_few_kernels(), _mixed, _inputs(1, 250), **options)
    assert _written_over(report) == [2]


def test_a_gradient_that_others_hold_is_not_written_over() -> None:
    """That of the step's own result."""
    torch.manual_seed(0)
    block = nn.Sequential(Layer(LLAMA), MLP())
    report = mstpass.explain(block, *_inputs(1, 256), options={**LEAST, "chunk_tokens": 64})
    assert _written_over(report) == [1]


# ---- what is taken -------------------------------------------------------------------------------
def _detected(model: nn.Module) -> tuple[list[str], list[str]]:
    """The kinds of the regions that are blocks, and why others are none."""
    joint = JointGraph(*joint_graph(_loss_of(model), *_inputs(1, 64)))
    blocks, rejections = detect_blocks(joint, find_regions(joint)[0])
    return [block.kind for block in blocks], [rejection.reason for rejection in rejections]


class Changed(Model):
    """One layer that is no block."""

    def __init__(self, change: str):
        super().__init__(LLAMA, layers=1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        ((layer, mlp),) = self.layers
        if self.change == "no residual":
            h = layer.attention(layer.norm(x))
        else:
            h = layer(x)
        y = h if self.change == "no MLP" else mlp(h)
        if self.change == "read elsewhere":
            y = y + h.sin()
        logits = self.head(self.norm(y)).flatten(0, 1)
        return F.cross_entropy(logits, torch.arange(len(logits)) * 7 % WORDS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("", None),
        ("no residual", NO_RESIDUAL),
        ("no MLP", NO_MLP),
        ("read elsewhere", LEAVES),
    ],
)
def test_what_is_a_block(change: str, reason: str | None) -> None:
    torch.manual_seed(0)
    kinds_of_blocks, reasons = _detected(Changed(change))
    assert (kinds_of_blocks, reasons) == ((["block"], []) if reason is None else ([], [reason]))


def _planned(form: Form, **options: Any) -> mstpass.Report:
    torch.manual_seed(0)
    return mstpass.explain(
        Model(form), *_inputs(1, 4096), options={"memory_budget": 0.0, **options}
    )


def test_the_least_memory_has_blocks_where_queries_share_keys() -> None:
    apart, blocks = (_planned(LLAMA, chunk=chunk, chunk_tokens=128) for chunk in ("heads", "auto"))
    assert [kind for kind, _ in kinds(blocks)].count("block") == LAYERS
    assert blocks.peak_bytes is not None and apart.peak_bytes is not None
    assert blocks.peak_bytes < 0.9 * apart.peak_bytes


@pytest.mark.parametrize("gpu", ["a100", "h100"])  # flash attention, and cuDNN's
def test_the_least_memory_has_blocks_on_a_gpu(gpu: str) -> None:
    x = torch.empty(1, 2**18, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.device("meta"):
        model = nn.Sequential(*Model(dataclasses.replace(LLAMA, rope="")).to(torch.bfloat16).layers)
    options = {"memory_budget": 0.0}
    report = mstpass.explain(model, x, options=options, device="cuda", gpu=gpu)
    assert [kind for kind, _ in kinds(report)].count("block") == LAYERS, str(report)


def test_a_key_for_each_query_has_no_blocks() -> None:
    """Keys, values and their gradients are as large as the input: loops over heads need less."""
    form = Form(mask="causal")
    apart, blocks = (_planned(form, chunk=chunk) for chunk in ("auto", "blocks"))
    assert "block" not in [kind for kind, _ in kinds(apart)]
    assert "block" in [kind for kind, _ in kinds(blocks)]
    assert blocks.peak_bytes is not None and apart.peak_bytes is not None
    assert apart.peak_bytes < blocks.peak_bytes
