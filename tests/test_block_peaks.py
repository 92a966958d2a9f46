"""Blocks: Inductor's schedule needs no more than what is simulated, and hardly less."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile

import mstpass
from tests.attention_models import Attention, Form
from tests.checks import compiled, kinds

FULL = pytest.mark.full
WIDTH, HEADS, LAYERS, WORDS = 128, 8, 2, 600
LLAMA = Form(kv_heads=2, rope="halves", mask="causal", shared_kv=True)
PLAIN = dataclasses.replace(LLAMA, rope="")


class Block(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention(form, WIDTH, HEADS)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.norms[0](x))
        n = self.norms[1](h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(form) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(x))).flatten(0, 1)
        return F.cross_entropy(logits, torch.arange(len(logits)) * 7 % WORDS)


def _no_kernel(*_: object, **__: object) -> Callable[..., None]:
    return lambda *_: None


@pytest.mark.parametrize(
    ("form", "batch", "tokens", "chunk", "dtype"),
    [
        # the peak is where attention's gradients are computed, and where the MLP's are
        pytest.param(LLAMA, 2, 256, 16, torch.float32, id="sequences, short chunks"),
        pytest.param(LLAMA, 2, 256, 64, torch.float32, id="sequences", marks=FULL),
        pytest.param(LLAMA, 1, 512, 16, torch.float32, id="one sequence", marks=FULL),
        pytest.param(
            dataclasses.replace(LLAMA, mask=""), 2, 256, 16, torch.float32, id="full", marks=FULL
        ),
        pytest.param(PLAIN, 2, 256, 32, torch.bfloat16, id="16 bits"),
    ],
)
def test_the_schedule_needs_what_is_simulated(
    form: Form,
    batch: int,
    tokens: int,
    chunk: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are scheduled, and none of them is compiled."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", _no_kernel)
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, WIDTH, dtype=dtype, requires_grad=True)
    step = compiled(
        Model(form).to(dtype),
        memory_budget=0.0,
        chunk="blocks",
        chunk_tokens=chunk,
        inductor={"fx_graph_cache": False},
    )
    step(x)
    report = mstpass.reports()[-1]
    assert [kind for kind, _ in kinds(report)].count("block") == LAYERS, str(report)
    scheduled, simulated = report.outcome.scheduled_peak_bytes, report.outcome.peak_bytes
    assert scheduled is not None and simulated is not None
    assert 0.95 * simulated <= scheduled <= 1.001 * simulated
