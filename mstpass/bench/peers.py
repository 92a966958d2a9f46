"""Measure peak memory and time of a Llama-like step, forward and backward:
eager, checkpointing, hand-tiled code, Inductor with its own options, and
mst.

examples:
  mstpass bench peers
  mstpass bench peers --markdown docs/results/peers.md
"""

from __future__ import annotations

import torch

from mstpass.bench import comparison, results
from mstpass.bench.comparison import INDUCTOR, MST, Contender, auto_chunker, eager, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import Llama, LlamaSize, LossFn, Work, llama
from mstpass.bench.results import Result
from mstpass.torch_internals.settings import torch_budget

BUDGET_0 = "mst, memory_budget=0.0"
CHUNKED = "mst, memory_budget=0.0, solver=min_cut"
# limits of peak / Inductor and of time / Inductor, by contender
LIMITS = {MST: (0.40, 1.02), CHUNKED: (0.30, 1.20), BUDGET_0: (0.30, 1.20)}
TILES = 8
QUICK = LlamaSize(64, 2, 2, 256, 4096, 512)
LARGE = LlamaSize(width=512, layers=8, heads=8, mlp_width=1408, length=4096)


def run(arguments: Arguments) -> Result:
    size = QUICK if arguments.quick else LlamaSize()
    model, ids_BS, target_BS = llama(size, arguments.device)
    work = Work.of(model, lambda: model(ids_BS, target_BS))
    contenders = _contenders(model, ids_BS, target_BS)
    rows = comparison.measured("peers", contenders, work, arguments)
    base = rows[INDUCTOR]
    result = Result("peers", f"A Llama-like step, forward and backward: {size}")
    result.tables.append(results.steps_table("step", rows.values(), base))
    for name, limits in LIMITS.items():
        what = f"{name}: {{}} / Inductor"
        result.targets += results.peak_and_time_targets(what, rows[name], base, *limits)
    results.judge_estimates(result, "mst's times", rows.values(), base)
    ours = (row for row in rows.values() if row.name.startswith(MST))
    result.notes += [
        f"Loss and gradients equal eager's. Hand-tiled: MLPs and loss in {TILES} tiles each, as "
        "MST and ALST do it. Time: median ratio over interleaved rounds (least-greatest). "
        "memory_budget=0.0 recomputes blocks, attention too, between checkpoints; with min_cut "
        "MLPs alone.",
        *(f"{row.name}: {row.plan or 'nothing chunked'}." for row in ours),
    ]
    result.records["rows"] = results.records(rows)
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


main = Benchmark("peers", (run,), __doc__)
