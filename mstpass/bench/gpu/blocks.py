"""Part `blocks`: Llama-3-8B-shaped blocks with head and loss, under budgets from all to least."""

from __future__ import annotations

import dataclasses

import torch

from mstpass.bench.gpu import llama
from mstpass.bench.gpu.job import Job
from mstpass.bench.gpu.rows import Case, Settings
from mstpass.bench.gpu.side_by_side import Way, Workload, eager, inductor, measure, mst

NAME = "blocks"
TOKENS, QUICK_TOKENS = 8192, 1024
BYTES_SHARE = 0.6  # the budget in bytes, as a share of the peak of Inductor's step
_BYTES = f"mst, {100 * BYTES_SHARE:.0f} % of Inductor's bytes"
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
        mst("mst, memory_budget=0.0", memory_budget=0.0),
        mst("mst, memory_budget=1.0 (free)", memory_budget=1.0),
        mst("mst, memory_budget=0.5", memory_budget=0.5),
        dataclasses.replace(mst(_BYTES), from_base=_within_bytes),
        mst("mst, memory_budget=0.25", memory_budget=0.25),
        mst("mst, memory_budget=0.75", memory_budget=0.75),
        eager(),
    ]


def _within_bytes(inductor_bytes: int) -> Way:
    return mst(_BYTES, memory_budget=int(BYTES_SHARE * inductor_bytes))
