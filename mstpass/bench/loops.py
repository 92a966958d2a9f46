"""`mstpass bench loops`: an LM head with its loss, and chained MLPs, as loops over the tokens.

The *floor* of a head is the memory that no loop can avoid: the weight gradient, the input gradient,
and one chunk of logits.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from mstpass.bench import comparison, figures, measure_chunk_costs
from mstpass.bench.comparison import INDUCTOR, MST, Contender, auto_chunker, eager, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import Head, MLPs
from mstpass.bench.results import Result, Table, Target, mib_cell, quotient, times_cell
from mstpass.graph import device_costs

TIME_LIMIT, PEAK_LIMIT = 1.03, 1.10
BUDGET_0 = "mst, memory_budget=0.0"
_DESCRIPTION = """\
Measure an LM head with cross-entropy, and chained SwiGLU MLPs: step time
and peak of mst and others, against Inductor without chunks and against the
floor, which is the memory that no loop can avoid."""
EXAMPLES = """  mstpass bench loops
  mstpass bench loops --repeats 9 --markdown docs/results/loops.md
  mstpass bench loops --quick --json /tmp/loops.json
  mstpass bench loops --store            store what chunks cost here, for later runs
"""


@dataclass(frozen=True)
class Sizes:
    """Shapes of both workloads.

    Attributes:
        chunks: the number of chunks that the targets hold for.
        sweep: other numbers of chunks.
    """

    tokens: int = 2048
    vocabulary: int = 32_000
    widths: tuple[int, ...] = (256, 768)
    chunks: int = 8
    sweep: tuple[int, ...] = (4, 16, 32)
    mlp_tokens: int = 4096
    mlp_width: int = 1024
    mlp_layers: int = 3


QUICK = Sizes(512, 4096, (64,), 4, (8,), 512, 256, 2)


def run(arguments: Arguments) -> Result:
    sizes = QUICK if arguments.quick else Sizes()
    result = Result("loops", "Heads and MLPs as loops, forward and backward")
    for width in sizes.widths:
        _heads(sizes, width, arguments, result)
    _mlps(sizes, arguments, result)
    _costs(arguments, result)
    result.notes.append(
        "Time: median ratio to Inductor over interleaved rounds (least-greatest). Floor: weight "
        "gradient + input gradient + one chunk of logits. Estimated: by the cost model, with the "
        "deviation from the measured median."
    )
    return result


def _heads(sizes: Sizes, width: int, arguments: Arguments, result: Result) -> None:
    head = Head.build(sizes.tokens, width, sizes.vocabulary, arguments.device)
    chunks = {f"{MST}, {n} chunks": n for n in (sizes.chunks, *sizes.sweep)}
    fixed = [
        eager(),
        inductor(),
        auto_chunker(chunks=sizes.chunks),
        *_linear_cross_entropy(head, sizes.tokens // sizes.chunks),
    ]
    ours = [mst(name, chunk_tokens=sizes.tokens // n) for name, n in chunks.items()]
    default = mst("mst, its own choice")
    contenders = [*fixed, *ours, default]
    title = f"head, d={width}, V={sizes.vocabulary}, N={sizes.tokens}, fp32"
    rows = comparison.measured(title, contenders, head.loss, head.step, arguments)
    result.records[f"head_{width}"] = figures.records(rows)
    counts = {c.name: sizes.chunks for c in fixed} | chunks
    floors = {name: head.floor_bytes(count) for name, count in counts.items()}
    of_floor = {row.name: quotient(row.peak_bytes, floors.get(row.name)) for row in rows.values()}
    own = {
        "floor MiB": lambda row: mib_cell(floors.get(row.name)),
        "peak / floor": lambda row: times_cell(of_floor[row.name]),
    }
    columns = ("", "time / Inductor", "estimated", "peak MiB", *own)
    base = rows[INDUCTOR]
    result.tables.append(figures.steps_table(title, rows.values(), base, columns, own))
    main_name = f"{MST}, {sizes.chunks} chunks"
    ratio = figures.time_ratio(rows[main_name], base)
    result.targets += [
        Target(f"d={width}: time / Inductor", ratio, TIME_LIMIT),
        Target(f"d={width}: peak / floor", of_floor[main_name], PEAK_LIMIT),
    ]
    figures.judge_estimates(result, f"d={width}", rows.values(), base)


def _mlps(sizes: Sizes, arguments: Arguments, result: Result) -> None:
    width = sizes.widths[0]
    mlps = MLPs.build(sizes.mlp_tokens, width, sizes.mlp_width, sizes.mlp_layers, arguments.device)
    title = (
        f"{sizes.mlp_layers} chained SwiGLU MLPs, d={width}, l={sizes.mlp_width}, "
        f"N={sizes.mlp_tokens}, fp32"
    )
    contenders = [eager(), inductor(), mst(), mst(BUDGET_0, memory_budget=0.0)]
    rows = comparison.measured(title, contenders, mlps.value, mlps.step, arguments)
    columns = ("", "time / Inductor", "estimated", "peak MiB", "peak / Inductor", "chunks")
    base = rows[INDUCTOR]
    result.tables.append(figures.steps_table(title, rows.values(), base, columns))
    figures.judge_estimates(result, "MLPs", rows.values(), base)
    result.records["mlps"] = figures.records(rows)


def _costs(arguments: Arguments, result: Result) -> None:
    device = arguments.device
    measured = measure_chunk_costs.measure(device, arguments.quick)
    used, work = device_costs.costs_of(device), measure_chunk_costs.work(device, arguments.quick)
    slowdowns = {
        "rows": lambda found: str(found[0]),
        "measured": lambda found: f"{found[1]:.2f}x",
        "in use": lambda found: f"{used.slowdown(work, found[0]):.2f}x",
    }
    speeds = {
        "dtype": lambda found: found[0],
        "measured": lambda found: f"{found[1] / 1e3:.1f}",
        "in use": lambda found: f"{used.rate(getattr(torch, found[0])) / 1e3:.1f}",
    }
    rates = ((measured.dtype, measured.flops_per_us), *measured.rates)
    result.tables += [
        Table.of("what chunks cost", measured.slowdown, slowdowns),
        Table.of("speed of whole products, GFLOP/s", rates, speeds),
    ]
    copied = (measured.copied_bytes_per_us or 0) / 1e3
    result.notes.append(
        f"Fixed cost of one chunk: {measured.chunk_us:.0f} us. Speed of a copy: {copied:.1f} GB/s."
    )
    if arguments.store:
        path = device_costs.store(device, measured)
        result.notes.append(f"Stored in {path} for later compilations on this device.")
    result.records["costs"] = dataclasses.asdict(measured)


def _linear_cross_entropy(head: Head, rows: int) -> list[Contender]:
    function = comparison.linear_cross_entropy()
    if function is None:
        return []
    run = functools.partial(function, head.hidden, head.weight, head.target)
    by_rows = functools.partial(run, batch_chunk_size=rows)
    return [
        eager(f"F.linear_cross_entropy, {rows} rows", by_rows),
        eager("F.linear_cross_entropy, default", run),
    ]


main = Benchmark("loops", (run,), _DESCRIPTION, EXAMPLES, options=("store",))
