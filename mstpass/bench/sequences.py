"""Measure the peak memory of a rank and the time of a step of transformers'
Llama whose sequences 1, 2 and 4 ranks share, with 2,048 tokens on each, on
processes of one thread: Inductor and mst with the same attention. Gradients
are compared with one process on the whole sequence. Two layers, with --large
four; with --quick on 1 and 2 ranks. Ten to twenty minutes on two cores.

Each rank is a process of one thread; they speak gloo. Every way has the same attention, that of
``mstpass.sequence_parallel``, so that Inductor's steps have the same exchanges.

examples:
  mstpass bench sequences
  mstpass bench sequences --repeats 9 --markdown docs/results/sequences.md
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mstpass
from mstpass.bench import results
from mstpass.bench.comparison import INDUCTOR, MST, Comparison, Outcome, inductor, mst
from mstpass.bench.fsdp import rows_of_ranks, slowest_and_highest
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.huggingface import Scale, architectures
from mstpass.bench.models import LlamaSize, Step, Work
from mstpass.bench.results import Result, Row, Table, Target
from mstpass.errors import UserError

RANKS = (1, 2, 4)
GROUPS = 2
LEAST = f"{MST}, memory_budget=0.0"
IN_GROUPS = f"{LEAST}, {GROUPS} groups of heads"
ONE_PROCESS = "one process, eager"
TOLERANCES = 1e-5, 1e-5  # relative errors of the loss and of a gradient, against one process
GROWTH_LIMIT, PLAN_LIMIT, PEAK_LIMIT, TIME_LIMIT = 1.05, 1.05, 0.35, 1.05
MEASUREMENTS = 5  # of each peak: gloo's threads free what they have sent sooner or later
SIZE = LlamaSize(width=256, layers=2, heads=8, mlp_width=1024, vocabulary=8192, length=2048)
LARGE = dataclasses.replace(SIZE, layers=4)
QUICK = LlamaSize(64, 1, 4, 128, 2048, 128)


_LEAST_ONES = (mst(name, memory_budget=0.0) for name in (LEAST, IN_GROUPS))
WAYS = {way.name: way for way in (inductor(), mst(), *_LEAST_ONES)}


def run(arguments: Arguments) -> Result:
    if arguments.device.type != "cpu":
        raise UserError("mstpass bench sequences measures on the CPU: add --device cpu")
    size = QUICK if arguments.quick else LARGE if arguments.large else SIZE
    several = [ranks for ranks in RANKS if ranks <= 2 or not arguments.quick]
    result = Result("sequences", f"One sequence on {', '.join(map(str, several))} ranks: {size}")
    by_ranks = {
        ranks: {row.name: row for row in slowest_and_highest(of_ranks(size, ranks, arguments))}
        for ranks in several
    }
    for ranks, rows in by_ranks.items():
        result.tables.append(_table(rows, f"Ranks: {ranks}, with {size.length} tokens on each"))
        result.records[f"{ranks} ranks"] = results.records(rows)
    result.targets += _targets(by_ranks)
    result.notes += [
        f"Each rank has one thread. Peak: the lowest of {MEASUREMENTS} steps, of the rank with the "
        "highest one; gloo's threads free what they have sent sooner or later. Time: of the rank "
        "that takes longest; median ratio over interleaved rounds (least-greatest). Gradient "
        f"error: the largest, relative to {ONE_PROCESS} on the whole sequence, float32."
    ]
    return result


def _targets(by_ranks: dict[int, dict[str, Row]]) -> list[Target]:
    def worst(ratio: Callable[[dict[str, Row]], float | None]) -> float | None:
        return max((r for rows in by_ranks.values() if (r := ratio(rows))), default=None)

    peaks = [rows[LEAST].peak_bytes or 0 for rows in by_ranks.values()]
    two = by_ranks[2]
    growth, what = max(peaks) / min(peaks), f"{LEAST}: {{}}, the worst"
    simulated = worst(lambda r: results.quotient(r[LEAST].peak_bytes, r[LEAST].simulated_bytes))
    peak = worst(lambda rows: results.peak_ratio(rows[LEAST], rows[INDUCTOR]))
    time = results.time_ratio(two[MST], two[INDUCTOR])
    return [
        Target(f"{LEAST}: highest / lowest peak of a rank", growth, GROWTH_LIMIT),
        Target(what.format("measured / simulated peak"), simulated, PLAN_LIMIT),
        Target(what.format(f"peak / {INDUCTOR}"), peak, PEAK_LIMIT),
        Target(f"{MST}: time / {INDUCTOR}, 2 ranks", time, TIME_LIMIT),
    ]


def _table(rows: dict[str, Row], title: str) -> Table:
    own = {
        "peak MiB of a rank": lambda row: results.mib_cell(row.peak_bytes),
        "simulated MiB": lambda row: results.mib_cell(row.simulated_bytes),
        "gradient error": lambda row: f"{row.gradient_error:.1e}",
    }
    peaks, error = tuple(own)[:2], tuple(own)[2]
    columns = ("", *peaks, "peak / Inductor", "time s", "time / Inductor", error)
    return results.steps_table(title, rows.values(), rows[INDUCTOR], columns, own)


def of_ranks(size: LlamaSize, ranks: int, arguments: Arguments) -> list[list[Row]]:
    """The rows of each rank."""
    what = f"mstpass bench sequences: one of {ranks} ranks"
    return rows_of_ranks(what, figures_of_rank, size, arguments.repeats, ranks)


# ---- a rank ------------------------------------------------------------------------------------
class _SummedStep(Step):
    """A step whose outcome is that of all ranks together; a call leaves each rank its own."""

    def __call__(self) -> Tensor:
        return super().with_gradients()[0]

    def with_gradients(self) -> Outcome:
        loss, gradients = super().with_gradients()
        for value in (loss, *gradients):
            dist.all_reduce(value)
        return loss, gradients


def figures_of_rank(size: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    """This rank's figures of each way."""
    sizes = LlamaSize(**size)
    random = torch.Generator().manual_seed(1)  # all ranks hold the whole batch
    length = sizes.length * dist.get_world_size()
    ids_BS = torch.randint(sizes.vocabulary, (sizes.batch, length), generator=random)
    batch = {"input_ids": ids_BS, "labels": ids_BS}

    def work(head_groups: int | None = None) -> Work:
        """That of a rank; without ``head_groups``, of one process on the whole batch."""
        model, part, make = _model(sizes, length), batch, Step
        if head_groups is not None:
            mstpass.sequence_parallel(model, head_groups=head_groups)
            part, make = mstpass.shard_sequence(batch, gradients="sum"), _SummedStep
        loss = lambda: model(**part).loss
        return Work.of(model, loss, make=make, tolerances=TOLERANCES)

    one = work()
    reference = ONE_PROCESS, one.step(one.fn).with_gradients()
    comparison = Comparison(None, torch.device("cpu"), ranks=True, reference=reference)
    for name, way in WAYS.items():
        own = functools.partial(work, GROUPS if name == IN_GROUPS else 1)
        comparison.add([dataclasses.replace(way, work=own)])
    comparison.measure_peaks(MEASUREMENTS)
    del one, reference  # free their memory
    comparison.time(repeats)
    return results.records(comparison.rows)


def _model(size: LlamaSize, length: int) -> nn.Module:
    """transformers' Llama, two query heads for each key-value head, alike on all ranks."""
    sizes = Scale(size.vocabulary, size.width, size.heads, size.mlp_width, layers=size.layers)
    return architectures(dataclasses.replace(sizes, length=length))["llama"].build()


main = Benchmark("sequences", (run,), __doc__, ("large",))
