"""Part `loops`: what chunks cost on this device, and how the chunk length changes a loop's time.

The first case is the calibration of `mstpass bench loops --store`. Its figures are stored in the
results' folder, where the plans of all later parts find them, and for later compilations on this
device. The others run a head at several chunk lengths, and a chain of MLPs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from mstpass.bench import measure_chunk_costs
from mstpass.bench.gpu import heads
from mstpass.bench.gpu.job import Job
from mstpass.bench.gpu.rows import DRY, MEASURED, Case, Settings
from mstpass.bench.gpu.side_by_side import Way, Workload, eager, inductor, measure, mst
from mstpass.bench.models import MLPs
from mstpass.graph import device_costs

NAME = "loops"
COSTS_FILE, COSTS_VARIABLE = "gpu-costs.json", "MSTPASS_COSTS"
CALIBRATION, HEAD, MLP = "chunk costs", "head by chunk length", "MLPs"
LENGTHS, QUICK_LENGTHS = (1024, 2048, 512, 4096), (256, 512)
_TOKENS, _QUICK_TOKENS = 8192, 2048
_MLP_SIZES, _QUICK_MLP_SIZES = (16_384, 4096, 14_336, 2), (2048, 256, 1024, 2)
_LIMIT_S = 120.0


def cases(settings: Settings) -> list[Case]:
    return [
        Case(NAME, CALIBRATION, ("calibration",), _LIMIT_S),
        Case(NAME, HEAD, tuple(way.name for way in head_ways(settings.quick)), _LIMIT_S),
        Case(NAME, MLP, tuple(way.name for way in mlp_ways()), _LIMIT_S),
    ]


def work(job: Job) -> None:
    quick = job.settings.quick
    if job.case.name == CALIBRATION:
        _calibrate(job)
    elif job.case.name == HEAD:
        tokens = _QUICK_TOKENS if quick else _TOKENS
        measure(job, lambda device: heads.workload(tokens, quick, device), head_ways(quick))
    else:
        measure(job, lambda device: mlps(quick, device), mlp_ways())


def head_ways(quick: bool) -> list[Way]:
    lengths = QUICK_LENGTHS if quick else LENGTHS
    named = [mst(f"mst, {n} tokens a chunk", chunk_tokens=n) for n in lengths]
    return [inductor(), mst("mst, its own choice"), *named]


def mlp_ways() -> list[Way]:
    return [
        inductor(),
        mst("mst, memory_budget=free", memory_budget="free"),
        mst("mst, memory_budget=0.0", memory_budget=0.0),
        eager(),
    ]


def mlps(quick: bool, device: torch.device) -> Workload:
    """A chain of SwiGLU MLPs as wide as Llama-3-8B's."""
    tokens, width, mlp_width, layers = _QUICK_MLP_SIZES if quick else _MLP_SIZES
    chain = MLPs.build(tokens, width, mlp_width, layers, device, heads.DTYPE)
    return Workload(
        fn=chain.layers,
        args=(chain.hidden,),
        leaves=(chain.hidden, *chain.layers.parameters()),
        tangent=chain.tangent,
        flops=18.0 * layers * tokens * width * mlp_width,
    )


def costs_path(out: Path) -> Path:
    """Where the costs are for this run: in its folder, or where the user has them."""
    return Path(os.environ.get(COSTS_VARIABLE) or out / COSTS_FILE).absolute()


def _calibrate(job: Job) -> None:
    """Measure what chunks cost, beside what is assumed where nothing was measured."""
    (row,) = job.case.rows
    job.start(row)
    device, quick = torch.device("cuda"), job.settings.quick
    if not job.device.runs:
        job.finish(row, DRY, assumed=_assumed(device, quick, heads.DTYPE))
        return
    measured = measure_chunk_costs.measure(device, quick)
    assumed = _assumed(device, quick, heads.DTYPE)
    if not quick:
        device_costs.store(device, measured)
    costs = dataclasses.asdict(measured)
    job.finish(row, MEASURED, clocks=job.device.clocks(), costs=costs, assumed=assumed)


def _assumed(device: torch.device, quick: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The costs in use, for the rows that are measured."""
    used, work = device_costs.costs_of(device), measure_chunk_costs.work(device, quick)
    sweep = measure_chunk_costs.QUICK if quick else measure_chunk_costs.LARGE
    return {
        "slowdown": [[rows, used.slowdown(work, rows)] for rows in sweep.rows],
        "flops_per_us": used.rate(dtype),
    }


def store_for_later(out: Path) -> Path | None:
    """Add the costs in a run's folder to those that other compilations on this device use.

    Returns:
        The file that has them now; None if the run has measured none.
    """
    measured, path = out / COSTS_FILE, device_costs.costs_path()
    if not measured.exists():
        return None
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    new = {**old, **json.loads(measured.read_text(encoding="utf-8"))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    return path
