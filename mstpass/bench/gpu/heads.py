"""Part `heads`: an LM head with cross-entropy at the sizes of Llama-3, each way that there is.

All ways get bfloat16 hidden states and weights, and compute the loss in float32, as transformers
does. Chunks cost no extra products in the fused mode, so one step is three products of N x D x V:
6 N D V floating-point operations. TFLOP/s are these over the median time.

Shapes: x (N, D), w (V, D), y (N,).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.bench import comparison
from mstpass.bench.gpu.job import Job
from mstpass.bench.gpu.rows import Case, Settings
from mstpass.bench.gpu.side_by_side import Way, Workload, eager, inductor, measure, mst
from mstpass.bench.models import Head
from mstpass.torch_internals.versions import installed

NAME = "heads"
DTYPE = torch.bfloat16
WIDTH, VOCABULARY, TOKENS = 4096, 128_256, (8192, 32_768)
QUICK_WIDTH, QUICK_VOCABULARY, QUICK_TOKENS = 256, 4096, (2048,)
_LIMIT_S = 120.0


def cases(settings: Settings) -> list[Case]:
    rows = tuple(way.name for way in ways())
    tokens = QUICK_TOKENS if settings.quick else TOKENS
    return [Case(NAME, f"N={n}", rows, _LIMIT_S) for n in tokens]


def work(job: Job) -> None:
    tokens = int(job.case.name.removeprefix("N="))
    measure(job, lambda device: workload(tokens, job.settings.quick, device), ways())


def workload(tokens: int, quick: bool, device: torch.device) -> Workload:
    width, vocabulary = sizes(quick)
    head = Head.build(tokens, width, vocabulary, device, DTYPE)
    return Workload(
        fn=head_loss,
        args=(head.hidden, head.weight, head.target),
        leaves=(head.hidden, head.weight),
        flops=6.0 * tokens * width * vocabulary,
    )


def sizes(quick: bool) -> tuple[int, int]:
    """Width and vocabulary."""
    return (QUICK_WIDTH, QUICK_VOCABULARY) if quick else (WIDTH, VOCABULARY)


def head_loss(x_ND: Tensor, w_VD: Tensor, y_N: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x_ND, w_VD).float(), y_N)


# ---- the ways ----------------------------------------------------------------------------------
def ways() -> list[Way]:
    """All ways, the first of which is what the others are compared with."""
    return [
        inductor(),
        mst(),
        mst("mst, memory_budget=0.0", memory_budget=0.0),
        Way(comparison.auto_chunker()),
        liger(),
        cut_cross_entropy(),
        torch_linear_cross_entropy(),
        eager(),
    ]


def liger() -> Way:
    """Liger-Kernel's fused head; the call of its releases since 0.3."""

    def load() -> Callable[..., Tensor]:
        loss: Any = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        return lambda x_ND, w_VD, y_N: loss(w_VD, x_ND, y_N)

    return _installed("Liger-Kernel", "liger_kernel", load)


def cut_cross_entropy() -> Way:
    """Cut Cross-Entropy, which keeps no logits at all (arXiv 2411.09009)."""

    def load() -> Callable[..., Tensor]:
        return import_module("cut_cross_entropy").linear_cross_entropy

    return _installed("Cut Cross-Entropy", "cut_cross_entropy", load)


def torch_linear_cross_entropy() -> Way:
    """torch's own chunked head."""
    function, name = comparison.linear_cross_entropy(), "F.linear_cross_entropy"
    if function is None:
        return eager(name, missing=f"torch {installed()} does not have it")
    return eager(name, function)


def _installed(name: str, package: str, load: Callable[[], Callable[..., Tensor]]) -> Way:
    """A way that another package offers; the package is imported when it is first run."""
    if find_spec(package) is None:
        return eager(name, missing=f"{package} is not installed")
    return eager(name, lambda *args: load()(*args), own_kernels=True)
