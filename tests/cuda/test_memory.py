"""The memory of a step on a GPU: what is simulated is what Inductor schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import decompositions

from mstpass.bench.gpu import llama
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.memory.workspaces import cublas_workspace_bytes, is_kept, workspace_bytes
from tests import test_head_peak as heads
from tests.cuda.dry_run import dry_run, tensor
from tests.cuda.generated_code import unused_buffers
from tests.cuda.steps import BF16, FP32, Step, head, mlps

pytestmark = pytest.mark.dry_run

TOKENS, WIDTH, HEADS, VOCABULARY = 2048, 256, 4, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def transformer(dtype: torch.dtype = BF16, masked: bool = False) -> Step:
    with torch.device("meta"):
        blocks = nn.ModuleList(Block() for _ in range(2)).to(dtype)
        words = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        ids = torch.empty(1, TOKENS, dtype=torch.long)

    def loss(ids: Tensor) -> Tensor:
        x, mask = words(ids), None
        if masked:
            place = torch.arange(ids.shape[1], device=ids.device)
            mask = ((place[:, None] >= place) & (ids != 0)[:, None, None, :]).expand(1, 1, -1, -1)
        for block in blocks:
            x = block(x, mask)
        return F.cross_entropy(lm_head(x).float().flatten(0, 1), ids.flatten())

    return loss, (ids,)


def _readers(monkeypatch: pytest.MonkeyPatch) -> list[ReadSchedule]:
    """What reads the schedules of the steps that are compiled from now on."""
    readers: list[ReadSchedule] = []
    peak_bytes = ReadSchedule.peak_bytes.fget
    assert peak_bytes is not None

    def seen(self: ReadSchedule) -> int | None:
        readers.append(self)
        return peak_bytes(self)

    monkeypatch.setattr(ReadSchedule, "peak_bytes", property(seen))
    return readers


CASES: dict[str, tuple[Callable[[], Step], dict[str, Any]]] = {
    "head": (lambda: head(4096, 256, 32000), {}),
    "a head that is left whole": (lambda: head(4096, 256, 32000), {"chunk": "off"}),
    "a head in sections": (lambda: head(1024, 1024, 32000), {"memory_budget": 0.0}),
    "a head with sums in float32": (lambda: head(4096, 256, 32000), {"accumulate": "float32"}),
    "mlps": (lambda: mlps("swiglu", 8192, 256), {"chunk_tokens": 1024}),
    "flash": (transformer, {"gpu": "a100"}),
    "efficient": (lambda: transformer(FP32, masked=True), {"gpu": "a100", "chunk_tokens": 512}),
    "cudnn": (transformer, {"gpu": "h100"}),
    "least memory": (transformer, {"gpu": "a100", "memory_budget": 0.0}),
}
ATTENTION = {"flash": "flash", "efficient": "efficient", "cudnn": "cudnn", "least memory": "flash"}


@pytest.mark.parametrize("name", CASES)
def test_the_scheduled_peak_is_the_simulated_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = _readers(monkeypatch)
    step, options = CASES[name]
    outcome = dry_run(*step(), **options).report.outcome
    assert outcome.scheduled_peak_bytes is not None
    # Steps this small have single buffers of a few per cent of their peak.
    scheduled = pytest.approx(outcome.scheduled_peak_bytes, rel=0.05, abs=4 * 2**20)
    assert outcome.peak_bytes == scheduled
    lines = (line for schedule in readers[-1].schedules for line in schedule.lines)
    calls = [line.op for line in lines if line.op is not None]
    products = sum("product" in op.op or "mm" in op.op for op in calls)
    attentions = [op for op in calls if "attention" in op.op]
    assert products >= 2
    assert all(workspace_bytes(op) > 0 for op in attentions if "backward" in op.op)
    kind = ATTENTION.get(name)
    backward = [op for op in attentions if "backward" in op.op]
    assert len(backward) == (2 if kind else 0)
    assert all(f"dot_product_{kind}_attention" in op.op for op in attentions)


@pytest.mark.parametrize("name", ["hinge", "gathered"])
def test_a_gradient_of_picked_logits_is_written_over_the_logits(name: str) -> None:
    """It is computed from narrow values alone, in the kernel that reads the logits."""
    tokens, width, words = heads.N, heads.D, heads.V
    loss = heads.ONE[name]

    def value(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x.view(2, -1, width), weight)
        return loss(logits, logits.detach(), labels)

    inputs = (
        tensor(tokens, width, dtype=FP32, grad=True),
        tensor(words, width, dtype=FP32, grad=True),
        torch.empty(2, tokens // 2, dtype=torch.long, device="meta"),
    )
    run = dry_run(value, inputs, chunk_tokens=heads.CHUNK)
    floor = 4 * (words * width + tokens * width + heads.CHUNK * words)
    floor += 0 if is_kept() else cublas_workspace_bytes((9, 0))
    outcome = run.report.outcome
    assert outcome.scheduled_peak_bytes == pytest.approx(outcome.peak_bytes, rel=0.01)
    assert outcome.peak_bytes <= 1.05 * floor


def test_sums_of_partial_sums_are_in_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a norm's backward adds up rows and columns, the columns in a workspace."""
    readers = _readers(monkeypatch)
    inputs = [tensor(*size, dtype=BF16, grad=True) for size in ((8192, 1024), (1024,), (1024,))]
    loss = lambda x, *of_norm: F.layer_norm(x, (1024,), *of_norm).float().square().sum()
    code = dry_run(loss, inputs).text
    totals = re.findall(r"(\w+) = workspace_0\[.*\(dim=0\)", code)
    lines = [line for schedule in readers[-1].schedules for line in schedule.lines]
    assert len(totals) == 2  # the gradients of weight and bias, in float32
    assert all({total: 4 * 1024} in [line.allocated for line in lines] for total in totals)


def test_a_mask_has_one_buffer_for_all_heads() -> None:
    code = dry_run(*transformer(FP32, masked=True), gpu="a100").text
    calls = re.findall(r"efficient_attention_backward\.default\(.*", code)
    assert len(calls) == 2
    assert f"empty_strided_cuda((1, {HEADS}, {TOKENS}, {TOKENS})" not in code


def _embedding_gradient(
    gradient: Tensor, ids: Tensor, words: int, padding: int, by_frequency: bool
) -> Tensor:
    """As torch 2.11 computes it; later ones mask the rows within the scatter."""
    assert not by_frequency
    rows = gradient.float().masked_fill((ids == padding).unsqueeze(-1), 0)
    zeros = rows.new_zeros((words, rows.shape[-1]))
    total: Tensor = torch.ops.aten._unsafe_index_put(zeros, [ids], rows, accumulate=True)
    return total.to(gradient.dtype)


def test_a_value_over_the_result_of_a_loop_has_no_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of an embedding's gradient, more than there are words, are computed in no buffer."""
    op = torch.ops.aten.embedding_dense_backward.default
    monkeypatch.setitem(decompositions, op, _embedding_gradient)
    size = llama.Shape(WIDTH, 1, HEADS, 4 * WIDTH, TOKENS, 4 * TOKENS, key_value_heads=2)
    model = llama.LossAlone(size, torch.device("meta"))
    ids = torch.empty(1, 2 * TOKENS, dtype=torch.long, device="meta")
    code = dry_run(model, (ids,), memory_budget=0.0).text
    assert "in_out_ptr0" in code and not unused_buffers(code)
