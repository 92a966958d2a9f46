"""Part `heads`: an LM head with cross-entropy at the sizes of Llama-3, each way that there is.

All ways get bfloat16 hidden states and weights, and compute the loss in float32, as transformers
does. Chunks cost no extra products in the fused mode, so one step is three products of N x D x V:
6 N D V floating-point operations. TFLOP/s are these over the median time.

Shapes: x (N, D), w (V, D), y (N,).

Part `loops`: what chunks cost on this device, and how the chunk length changes a loop's time.

The first case is the calibration of `mstpass bench loops --store`. Its figures are stored in the
results' folder, where the plans of all later parts find them. The others run a head at several
chunk lengths, and a chain of MLPs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.bench import comparison, loops
from mstpass.bench.comparison import Contender, auto_chunker, eager, inductor, mst
from mstpass.bench.gpu.side_by_side import Measured, cases_of, measure
from mstpass.bench.gpu.state import DRY, MEASURED, Case, Job, Outcome, Settings, outcome
from mstpass.bench.models import Head, MLPs, Work
from mstpass.graph import device_costs
from mstpass.torch_internals.versions import installed

NAME = "heads"
DTYPE = torch.bfloat16
WIDTH, VOCABULARY, TOKENS = 4096, 128_256, (8192, 32_768)
QUICK_WIDTH, QUICK_VOCABULARY, QUICK_TOKENS = 256, 4096, (2048,)
_LIMIT_S = 120.0


def _measured(quick: bool) -> Measured:
    tokens = QUICK_TOKENS if quick else TOKENS
    return {f"N={n}": (functools.partial(workload, n, quick), ways()) for n in tokens}


def cases(settings: Settings) -> list[Case]:
    return cases_of(NAME, _measured(settings.quick), _LIMIT_S)


def work(job: Job) -> Outcome:
    return measure(job, *_measured(job.settings.quick)[job.case.name])


def workload(tokens: int, quick: bool, device: torch.device) -> Work:
    width, vocabulary = sizes(quick)
    head = Head.build(tokens, width, vocabulary, device, DTYPE)
    return Work(
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
def ways() -> list[Contender]:
    """All ways, the first of which is what the others are compared with."""
    return [
        inductor(),
        mst(),
        mst("mst, memory_budget=0.0", memory_budget=0.0),
        auto_chunker(),
        liger(),
        cut_cross_entropy(),
        torch_linear_cross_entropy(),
        eager(),
    ]


def liger() -> Contender:
    """Liger-Kernel's fused head; the call of its releases since 0.3."""

    def load() -> Callable[..., Tensor]:
        loss: Any = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        return lambda x_ND, w_VD, y_N: loss(w_VD, x_ND, y_N)

    return _installed("Liger-Kernel", "liger_kernel", load)


def cut_cross_entropy() -> Contender:
    """Cut Cross-Entropy, which keeps no logits at all (arXiv 2411.09009)."""

    def load() -> Callable[..., Tensor]:
        return import_module("cut_cross_entropy").linear_cross_entropy

    return _installed("Cut Cross-Entropy", "cut_cross_entropy", load)


def torch_linear_cross_entropy() -> Contender:
    """torch's own chunked head."""
    function, name = comparison.linear_cross_entropy(), "F.linear_cross_entropy"
    if function is None:
        return eager(name, missing=f"torch {installed()} does not have it")
    return eager(name, function)


def _installed(name: str, package: str, load: Callable[[], Callable[..., Tensor]]) -> Contender:
    """A way that another package offers; the package is imported when it is first run."""
    if find_spec(package) is None:
        return eager(name, missing=f"{package} is not installed")
    return eager(name, lambda *args: load()(*args), own_kernels=True)


# ---- chunks --------------------------------------------------------------------------------------
LOOPS = "loops"
COSTS_FILE, COSTS_VARIABLE = "gpu-costs.json", "MSTPASS_COSTS"
CALIBRATION, HEAD, MLP = "chunk costs", "head by chunk length", "MLPs"
LENGTHS, QUICK_LENGTHS = (1024, 2048, 512, 4096), (256, 512)
_TOKENS, _QUICK_TOKENS = 8192, 2048
_MLP_SIZES, _QUICK_MLP_SIZES = (16_384, 4096, 14_336, 2), (2048, 256, 1024, 2)


def _loops(quick: bool) -> Measured:
    tokens = _QUICK_TOKENS if quick else _TOKENS
    return {
        HEAD: (functools.partial(workload, tokens, quick), head_ways(quick)),
        MLP: (functools.partial(mlps, quick), mlp_ways()),
    }


def loop_cases(settings: Settings) -> list[Case]:
    first = Case(LOOPS, CALIBRATION, ("calibration",), _LIMIT_S)
    return [first, *cases_of(LOOPS, _loops(settings.quick), _LIMIT_S)]


def loop_work(job: Job) -> Outcome:
    if job.case.name == CALIBRATION:
        return _calibrate(job)
    return measure(job, *_loops(job.settings.quick)[job.case.name])


def head_ways(quick: bool) -> list[Contender]:
    lengths = QUICK_LENGTHS if quick else LENGTHS
    named = [mst(f"mst, {n} tokens a chunk", chunk_tokens=n) for n in lengths]
    return [inductor(), mst("mst, its own choice"), *named]


def mlp_ways() -> list[Contender]:
    return [
        inductor(),
        mst("mst, memory_budget=free", memory_budget="free"),
        mst("mst, memory_budget=0.0", memory_budget=0.0),
        eager(),
    ]


def mlps(quick: bool, device: torch.device) -> Work:
    """A chain of SwiGLU MLPs as wide as Llama-3-8B's."""
    tokens, width, mlp_width, layers = _QUICK_MLP_SIZES if quick else _MLP_SIZES
    chain = MLPs.build(tokens, width, mlp_width, layers, device, DTYPE)
    return Work(
        fn=chain.layers,
        args=(chain.hidden,),
        leaves=(chain.hidden, *chain.layers.parameters()),
        tangent=chain.tangent,
        flops=18.0 * layers * tokens * width * mlp_width,
    )


def costs_path(out: Path) -> Path:
    """Where the costs are for this run: in its folder, or where the user has them."""
    return Path(os.environ.get(COSTS_VARIABLE) or out / COSTS_FILE).absolute()


def _calibrate(job: Job) -> Outcome:
    """Measure what chunks cost, beside what is assumed where nothing was measured."""
    device, quick = torch.device("cuda"), job.settings.quick
    if not job.device.runs:
        return outcome(DRY, assumed=_assumed(device, quick, DTYPE))
    measured = loops.measure(device, quick)
    assumed = _assumed(device, quick, DTYPE)
    if not quick:
        device_costs.store(device, measured)
    costs = dataclasses.asdict(measured)
    return outcome(MEASURED, clocks=job.device.clocks(), costs=costs, assumed=assumed)


def _assumed(device: torch.device, quick: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The costs in use, for the rows that are measured."""
    used, loop_work = device_costs.costs_of(device), loops.work(device, quick)
    sweep = loops.QUICK_SWEEP if quick else loops.LARGE_SWEEP
    return {
        "slowdown": [[rows, used.slowdown(loop_work, rows)] for rows in sweep.rows],
        "flops_per_us": used.rate(dtype),
    }
