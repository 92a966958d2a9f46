"""Measures what chunks cost on a device; the choice of chunk lengths uses these costs.

The costs and their use are described in graph/device_costs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mstpass.bench.comparison import mst
from mstpass.bench.models import Head, Step
from mstpass.graph.measured_costs import ChunkCosts
from mstpass.measure import timed


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Shapes of the measured products: three matmuls of an LM head.

    Attributes:
        rows: chunk lengths in tokens.
    """

    rows: Sequence[int] = (64, 128, 256, 512, 1024)
    tokens: int = 2048
    width: int = 512
    vocabulary: int = 8192
    repeats: int = 7


QUICK = Sweep((64, 256), 512, 64, 2048, 2)
_LARGE = Sweep((128, 256, 512, 1024, 2048, 4096), 16_384, 2048, 32_768)


def measure(device: torch.device, quick: bool = False) -> ChunkCosts:
    """Time products of several chunk lengths: fp32 on CPUs, bfloat16 on GPUs.

    The least of several times counts.
    """
    sweep = QUICK if quick else Sweep() if device.type == "cpu" else _LARGE
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x_ND = torch.randn(sweep.tokens, sweep.width, device=device, dtype=dtype)
    w_VD = torch.randn(sweep.vocabulary, sweep.width, device=device, dtype=dtype)
    lengths = [*sweep.rows, sweep.tokens]
    steps: dict[int, Callable[[], object]] = {n: _products(x_ND, w_VD, n) for n in lengths}
    times = timed(steps, sweep.repeats, warmup=2, device=device)
    whole_s = times[sweep.tokens].min_s
    slowdown = tuple((n, max(1.0, round(times[n].min_s / whole_s, 3))) for n in sweep.rows)
    flops = 6 * sweep.tokens * sweep.width * sweep.vocabulary
    return ChunkCosts(
        slowdown=slowdown,
        chunk_us=round(_chunk_us(device, sweep.repeats), 1),
        flops_per_us=round(flops / whole_s * 1e-6, 1),
    )


def _products(x_ND: Tensor, w_VD: Tensor, rows: int) -> Callable[[], Tensor]:
    """A function that computes logits, input gradient and weight gradient in chunks of rows."""
    dw_VD, dx_ND = torch.zeros_like(w_VD), torch.empty_like(x_ND)

    def run() -> Tensor:
        for x_CD, dx_CD in zip(x_ND.split(rows), dx_ND.split(rows), strict=True):
            logits_CV = x_CD @ w_VD.t()
            torch.mm(logits_CV, w_VD, out=dx_CD)
            dw_VD.addmm_(logits_CV.t(), x_CD)
        return dw_VD

    return run


def _chunk_us(device: torch.device, repeats: int, tokens: int = 4096) -> float:
    """Microseconds that one more chunk adds to a compiled loop, from two loops over a tiny head."""
    torch.compiler.reset()
    head = Head.build(tokens, 16, 64, device)
    counts = (2, 66)
    steps: dict[int, Step] = {
        n: head.step(mst(chunk_tokens=-(-tokens // n)).build(head.loss)) for n in counts
    }
    times = timed(steps, repeats, warmup=2, device=device)
    few, many = (times[n].min_s for n in counts)
    return max(0.0, (many - few) / (counts[1] - counts[0]) * 1e6)
