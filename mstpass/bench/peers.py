"""`mstpass bench peers`: a Llama-like step in eager, hand-tiled, under Inductor and under mst."""

from __future__ import annotations

import torch

from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import (
    INDUCTOR,
    MST,
    Contender,
    Row,
    auto_chunker,
    compare,
    eager,
    inductor,
    mst,
    ratios,
    records,
)
from mstpass.bench.estimates import judge, peaks_and_times
from mstpass.bench.models import Llama, LlamaSize, LossFn, Step, llama
from mstpass.bench.tables import Result, Target
from mstpass.torch_internals.settings import torch_budget

BUDGET_0 = "mst, memory_budget=0.0"
CHUNKED = "mst, memory_budget=0.0, solver=min_cut"
# limits of peak / Inductor and of time / Inductor, by contender
LIMITS = {MST: (0.40, 1.02), CHUNKED: (0.30, 1.20), BUDGET_0: (0.30, 1.20)}
LARGE_LIMITS = {BUDGET_0: (0.17, 1.20)}
TILES = 8
QUICK = LlamaSize(64, 2, 2, 256, 4096, 512)
LARGE = LlamaSize(width=512, layers=8, heads=8, mlp_width=1408, length=4096)
_DESCRIPTION = """\
Measure peak memory and time of a Llama-like step, forward and backward:
eager, checkpointing, hand-tiled code, Inductor with its own options, and
mst."""
EXAMPLES = """  mstpass bench peers
  mstpass bench peers --large --repeats 3
  mstpass bench peers --markdown docs/results/peers.md
"""


def run(arguments: Arguments) -> Result:
    size = QUICK if arguments.quick else LARGE if arguments.large else LlamaSize()
    model, ids_BS, target_BS = llama(size, arguments.device)
    contenders = _contenders(model, ids_BS, target_BS)
    plain = lambda: model(ids_BS, target_BS)
    with Progress("peers", len(contenders) * (2 + arguments.repeats)) as advance:
        rows = compare(
            contenders,
            plain,
            lambda fn: Step(fn, list(model.parameters())),
            repeats=arguments.repeats,
            device=arguments.device,
            advance=advance,
        )
    result = Result("peers", f"A Llama-like step, forward and backward: {size}")
    result.tables.append(peaks_and_times("step", list(rows.values()), rows[INDUCTOR]))
    result.targets += _targets(rows, LARGE_LIMITS if arguments.large else LIMITS)
    judge(result, "mst's times", rows.values(), rows[INDUCTOR])
    result.notes += [
        f"Loss and gradients equal eager's. Hand-tiled: MLPs and loss in {TILES} tiles each, as "
        "MST and ALST do it. Time: median ratio over interleaved rounds (least-greatest). "
        "memory_budget=0.0 recomputes blocks, attention too, between checkpoints; with min_cut "
        "MLPs alone.",
        *(f"{row.name}: {row.plan or 'nothing chunked'}." for row in _ours(rows)),
    ]
    result.records["rows"] = records(rows)
    return result


def _contenders(model: Llama, ids: torch.Tensor, target: torch.Tensor) -> list[Contender]:
    def variant(checkpointed: bool = False, chunks: int = 1) -> LossFn:
        return lambda: model(ids, target, checkpointed=checkpointed, chunks=chunks)

    half = lambda: torch_budget(0.5)
    return [
        eager(),
        eager("eager, checkpoint per layer", variant(checkpointed=True)),
        eager("eager, hand-tiled MLP and loss", variant(chunks=TILES)),
        eager("eager, hand-tiled, checkpoint", variant(checkpointed=True, chunks=TILES)),
        inductor(),
        inductor("Inductor, checkpoint per layer", variant(checkpointed=True)),
        inductor("Inductor, activation_memory_budget=0.5", under=half),
        auto_chunker(),
        mst(),
        mst(CHUNKED, memory_budget=0.0, solver="min_cut"),
        mst(BUDGET_0, memory_budget=0.0),
    ]


def _targets(rows: dict[str, Row], limits: dict[str, tuple[float, float]]) -> list[Target]:
    base, targets = rows[INDUCTOR], []
    for name, (peak_limit, time_limit) in limits.items():
        peak = tables.quotient(rows[name].peak_bytes, base.peak_bytes)
        ratio = ratios(rows[name], base)
        targets += [
            Target(f"{name}: peak / Inductor", peak, peak_limit),
            Target(f"{name}: time / Inductor", ratio and ratio[0], time_limit),
        ]
    return targets


def _ours(rows: dict[str, Row]) -> list[Row]:
    return [row for row in rows.values() if row.name.startswith(MST)]


main = Command("peers", (run,), _DESCRIPTION, EXAMPLES, extra=("large",))
