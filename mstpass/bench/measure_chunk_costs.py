"""Measures what chunks cost on a device; the choice of chunk lengths uses these costs.

The costs and their use are described in graph/device_costs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mstpass.bench.comparison import mst
from mstpass.bench.models import Head, Step
from mstpass.graph.loop_work import LoopWork
from mstpass.graph.measured_costs import ChunkCosts
from mstpass.graph.products import CONTRACTED, ROWS, Product, TokenProduct
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
LARGE = Sweep((128, 256, 512, 1024, 2048, 4096), 16_384, 2048, 32_768)
_OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COPIED_BYTES = 2**28


def measure(device: torch.device, quick: bool = False) -> ChunkCosts:
    """Time products of several chunk lengths: fp32 on CPUs, half precision on GPUs.

    The least of several times counts.
    """
    sweep, dtype = _sweep(device, quick), _dtype(device)
    x_ND, w_VD = _operands(sweep, dtype, device)
    lengths = [*sweep.rows, sweep.tokens]
    steps: dict[int, Callable[[], object]] = {n: _products(x_ND, w_VD, n) for n in lengths}
    times = timed(steps, sweep.repeats, warmup=2, device=device)
    whole_s = times[sweep.tokens].min_s
    slowdown = tuple((n, max(1.0, round(times[n].min_s / whole_s, 3))) for n in sweep.rows)
    others = (other for other in _OTHER_DTYPES if other != dtype and _computes(other, device))
    return ChunkCosts(
        slowdown=slowdown,
        chunk_us=round(_chunk_us(device, sweep.repeats), 1),
        flops_per_us=round(work(device, quick).operations / whole_s * 1e-6, 1),
        dtype=_name(dtype),
        rates=tuple((_name(other), _rate(sweep, other, device)) for other in others),
        copied_bytes_per_us=_copied_bytes_per_us(device, _COPIED_BYTES >> 6 * quick),
    )


def work(device: torch.device, quick: bool = False) -> LoopWork:
    """What is measured: the products of the sweep, as the cost model sees them."""
    sweep, dtype = _sweep(device, quick), _dtype(device)
    n, d, v = sweep.tokens, sweep.width, sweep.vocabulary
    sizes = (((n, d, v), ROWS), ((n, v, d), ROWS), ((v, n, d), CONTRACTED))
    return LoopWork(
        n,
        tuple(
            TokenProduct(Product(*size, dtype=dtype, result_bytes=dtype.itemsize), tokens_in)
            for size, tokens_in in sizes
        ),
        kernels=len(sizes),
    )


def _sweep(device: torch.device, quick: bool) -> Sweep:
    return QUICK if quick else Sweep() if device.type == "cpu" else LARGE


def _dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if _computes(torch.bfloat16, device) else torch.float16


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has products in this dtype, and not only an emulation of them."""
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _operands(sweep: Sweep, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x_ND = torch.randn(sweep.tokens, sweep.width, device=device, dtype=dtype)
    return x_ND, torch.randn(sweep.vocabulary, sweep.width, device=device, dtype=dtype)


def _rate(sweep: Sweep, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per microsecond of the largest whole product, in another dtype."""
    x_ND, w_VD = _operands(sweep, dtype, device)
    step = {dtype: lambda: x_ND @ w_VD.t()}
    seconds = timed(step, 2, warmup=1, device=device)[dtype].min_s
    return round(2 * sweep.tokens * sweep.width * sweep.vocabulary / seconds * 1e-6, 1)


def _copied_bytes_per_us(device: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    step = {size: lambda: target.copy_(source)}
    seconds = timed(step, 5, warmup=1, device=device)[size].min_s
    return round(size / seconds * 1e-6, 1)


def _products(x_ND: Tensor, w_VD: Tensor, rows: int) -> Callable[[], Tensor]:
    """A function that computes logits, input gradient and weight gradient in chunks of rows.

    As in a loop, the weight gradient is summed in float32; in one piece it is a plain product.
    """
    whole, half = rows >= x_ND.shape[0], x_ND.dtype != torch.float32
    dx_ND = torch.empty_like(x_ND)
    dw_VD = torch.zeros_like(w_VD, dtype=x_ND.dtype if whole else torch.float32)
    summed: dict[str, Any] = {"out_dtype": torch.float32} if half else {}

    def run() -> Tensor:
        for x_CD, dx_CD in zip(x_ND.split(rows), dx_ND.split(rows), strict=True):
            logits_CV = x_CD @ w_VD.t()
            torch.mm(logits_CV, w_VD, out=dx_CD)
            if whole:
                torch.mm(logits_CV.t(), x_CD, out=dw_VD)
            else:
                torch.addmm(dw_VD, logits_CV.t(), x_CD, out=dw_VD, **summed)
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
