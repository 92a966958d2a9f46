"""Part `blocks`: Llama-3-8B-shaped blocks with head and loss, under budgets from all to least."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from mstpass.bench.gpu import llama
from mstpass.bench.gpu.job import Job
from mstpass.bench.gpu.rows import Case, Settings
from mstpass.bench.gpu.side_by_side import Way, Workload, eager, inductor, measure, mst

NAME = "blocks"
TOKENS, QUICK_TOKENS = 16_384, 1024
_LEAST, _FREE = "mst, memory_budget=0.0", "mst, memory_budget=1.0 (free)"
_BYTES = "mst, memory_budget in bytes"  # half-way between the peaks of the two
_LIMIT_S = 180.0


def cases(settings: Settings) -> list[Case]:
    rows = tuple(way.name for way in ways())
    return [Case(NAME, f"N={_tokens(settings.quick)}", rows, _LIMIT_S)]


def work(job: Job) -> None:
    measure(job, lambda device: workload(job.settings.quick, device), ways())


def workload(quick: bool, device: torch.device) -> Workload:
    size = llama.shape(quick)
    model, loss_of = llama.model_and_loss(size, device)
    return Workload(
        fn=llama.LossAlone(model, loss_of),
        args=(llama.token_ids(size, _tokens(quick), device),),
        leaves=list(model.parameters()),
    )


def _tokens(quick: bool) -> int:
    return QUICK_TOKENS if quick else TOKENS


def ways() -> list[Way]:
    return [
        inductor(),
        mst("mst"),
        mst(_LEAST, memory_budget=0.0),
        mst(_FREE, memory_budget=1.0),
        mst("mst, memory_budget=0.5", memory_budget=0.5),
        dataclasses.replace(mst(_BYTES), from_peaks=_half_way),
        mst("mst, memory_budget=0.25", memory_budget=0.25),
        mst("mst, memory_budget=0.75", memory_budget=0.75),
        eager(),
    ]


def _half_way(peaks: Mapping[str, int]) -> Way:
    if not {_LEAST, _FREE} <= peaks.keys():
        raise RuntimeError(f"needs the peaks of {_LEAST!r} and {_FREE!r}")
    return mst(_BYTES, memory_budget=(peaks[_LEAST] + peaks[_FREE]) // 2)
