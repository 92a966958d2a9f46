"""`mstpass bench loops`: an LM head with its loss, and chained MLPs, as loops over the tokens.

The *floor* of a head is the memory that no loop can avoid: the weight gradient, the input gradient,
and one chunk of logits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from mstpass.bench import estimates, measure_chunk_costs, tables
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
from mstpass.bench.models import Head, LossFn, MLPs
from mstpass.bench.tables import Result, Table, Target
from mstpass.graph import device_costs
from mstpass.torch_internals.versions import linear_cross_entropy

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
    rows = _compared(title, contenders, head.loss, head.step, arguments)
    _head_table(title, head, rows, {c.name: sizes.chunks for c in fixed} | chunks, result)
    result.records[f"head_{width}"] = records(rows)
    main_row, base = rows[f"{MST}, {sizes.chunks} chunks"], rows[INDUCTOR]
    ratio = ratios(main_row, base)
    floor = head.floor_bytes(sizes.chunks)
    result.targets += [
        Target(f"d={width}: time / Inductor", ratio and ratio[0], TIME_LIMIT),
        Target(f"d={width}: peak / floor", tables.quotient(main_row.peak_bytes, floor), PEAK_LIMIT),
    ]
    estimates.judge(result, f"d={width}", rows.values(), base)


def _head_table(
    title: str, head: Head, rows: dict[str, Row], chunks: dict[str, int], result: Result
) -> None:
    lines = []
    for row in rows.values():
        floor = head.floor_bytes(chunks[row.name]) if row.name in chunks else None
        lines.append(
            (
                row.name,
                row.error or tables.ratio_cell(ratios(row, rows[INDUCTOR])),
                estimates.cell(row, rows[INDUCTOR]),
                tables.mib_cell(row.peak_bytes),
                tables.mib_cell(floor),
                tables.times_cell(tables.quotient(row.peak_bytes, floor)),
            )
        )
    columns = ("", "time / Inductor", estimates.COLUMN, "peak MiB", "floor MiB", "peak / floor")
    result.tables.append(Table(title, columns, tuple(lines)))


def _mlps(sizes: Sizes, arguments: Arguments, result: Result) -> None:
    width = sizes.widths[0]
    mlps = MLPs.build(sizes.mlp_tokens, width, sizes.mlp_width, sizes.mlp_layers, arguments.device)
    title = (
        f"{sizes.mlp_layers} chained SwiGLU MLPs, d={width}, l={sizes.mlp_width}, "
        f"N={sizes.mlp_tokens}, fp32"
    )
    contenders = [eager(), inductor(), mst(), mst(BUDGET_0, memory_budget=0.0)]
    rows = _compared(title, contenders, mlps.value, mlps.step, arguments)
    base = rows[INDUCTOR]
    lines = tuple(
        (
            row.name,
            row.error or tables.ratio_cell(ratios(row, base)),
            estimates.cell(row, base),
            tables.mib_cell(row.peak_bytes),
            tables.times_cell(tables.quotient(row.peak_bytes, base.peak_bytes)),
            row.plan,
        )
        for row in rows.values()
    )
    columns = ("", "time / Inductor", estimates.COLUMN, "peak MiB", "peak / Inductor", "chunks")
    result.tables.append(Table(title, columns, lines))
    estimates.judge(result, "MLPs", rows.values(), base)
    result.records["mlps"] = records(rows)


def _costs(arguments: Arguments, result: Result) -> None:
    device = arguments.device
    measured = measure_chunk_costs.measure(device, arguments.quick)
    used, work = device_costs.costs_of(device), measure_chunk_costs.work(device, arguments.quick)
    lines = tuple(
        (str(rows), f"{slow:.2f}x", f"{used.slowdown(work, rows):.2f}x")
        for rows, slow in measured.slowdown
    )
    result.tables.append(Table("what chunks cost", ("rows", "measured", "in use"), lines))
    rates = ((measured.dtype, measured.flops_per_us), *measured.rates)
    result.tables.append(
        Table(
            "speed of whole products, GFLOP/s",
            ("dtype", "measured", "in use"),
            tuple(
                (name, f"{rate / 1e3:.1f}", f"{used.rate(getattr(torch, name)) / 1e3:.1f}")
                for name, rate in rates
            ),
        )
    )
    copied = (measured.copied_bytes_per_us or 0) / 1e3
    result.notes.append(
        f"Fixed cost of one chunk: {measured.chunk_us:.0f} us. Speed of a copy: {copied:.1f} GB/s."
    )
    if arguments.store:
        path = device_costs.store(device, measured)
        result.notes.append(f"Stored in {path} for later compilations on this device.")
    result.records["costs"] = dataclasses.asdict(measured)


def _compared(
    title: str, contenders: list[Contender], loss_fn: LossFn, step: Any, arguments: Arguments
) -> dict[str, Row]:
    with Progress(title, len(contenders) * (2 + arguments.repeats)) as advance:
        return compare(
            contenders,
            loss_fn,
            step,
            repeats=arguments.repeats,
            device=arguments.device,
            advance=advance,
        )


def _linear_cross_entropy(head: Head, rows: int) -> list[Contender]:
    """torch's own chunked head, if this torch has one."""
    found = linear_cross_entropy()
    if found is None:
        return []
    function, options = found

    def with_options(**chosen: Any) -> LossFn:
        return lambda: function(head.hidden, head.weight, head.target, options=options(**chosen))

    return [
        eager(f"F.linear_cross_entropy, {rows} rows", with_options(batch_chunk_size=rows)),
        eager("F.linear_cross_entropy, default", with_options()),
    ]


main = Command("loops", (run,), _DESCRIPTION, EXAMPLES, extra=("store",))
