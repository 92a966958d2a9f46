"""Measure an LM head with cross-entropy, and chained SwiGLU MLPs: step time
and peak of mst and others, against Inductor without chunks and against the
floor, which is the memory that no loop can avoid.

The *floor* of a head is the memory that no loop can avoid: the weight gradient, the input gradient,
and one chunk of logits.

What chunks cost on the device is measured too; the choice of chunk lengths uses these costs
(graph/device_costs.py).

examples:
  mstpass bench loops
  mstpass bench loops --repeats 9 --markdown docs/results/loops.md
  mstpass bench loops --quick --json /tmp/loops.json
  mstpass bench loops --store            store what chunks cost here, for later runs
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mstpass.bench import comparison, results
from mstpass.bench.comparison import INDUCTOR, MST, Contender, auto_chunker, eager, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import Head, MLPs, Step
from mstpass.bench.results import Result, Table, Target, mib_cell, quotient, times_cell
from mstpass.graph import device_costs
from mstpass.graph.loop_work import CONTRACTED, ROWS, LoopWork, Product, TokenProduct
from mstpass.graph.measured_costs import ChunkCosts
from mstpass.measure import timed


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Shapes of the measured products: three matmuls of an LM head.

    Attributes:
        rows: chunk lengths in tokens.
    """

    rows: Sequence[int] = (64, 128, 256, 512, 1024)
    tokens: int = 2048
    width: int = 512
    vocabulary: int = 8192
    repeats: int = 7


QUICK_SWEEP = Sweep((64, 256), 512, 64, 2048, 2)
LARGE_SWEEP = Sweep((128, 256, 512, 1024, 2048, 4096), 16_384, 2048, 32_768)
_OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COPIED_BYTES = 2**28


def measure(device: torch.device, quick: bool = False) -> ChunkCosts:
    """Time products of several chunk lengths: fp32 on CPUs, half precision on GPUs.

    The least of several times counts.
    """
    sweep, dtype = _sweep(device, quick), _dtype(device)
    x_ND, w_VD = _operands(sweep, dtype, device)
    lengths = [*sweep.rows, sweep.tokens]
    steps: dict[int, Callable[[], object]] = {n: _products(x_ND, w_VD, n) for n in lengths}
    times = timed(steps, sweep.repeats, warmup=2, device=device)
    whole_s = times[sweep.tokens].min_s
    slowdown = tuple((n, max(1.0, round(times[n].min_s / whole_s, 3))) for n in sweep.rows)
    others = (other for other in _OTHER_DTYPES if other != dtype and _computes(other, device))
    return ChunkCosts(
        slowdown=slowdown,
        chunk_us=round(_chunk_us(device, sweep.repeats), 1),
        flops_per_us=round(work(device, quick).operations / whole_s * 1e-6, 1),
        dtype=_name(dtype),
        rates=tuple((_name(other), _rate(sweep, other, device)) for other in others),
        copied_bytes_per_us=_copied_bytes_per_us(device, _COPIED_BYTES >> 6 * quick),
    )


def work(device: torch.device, quick: bool = False) -> LoopWork:
    """What is measured: the products of the sweep, as the cost model sees them."""
    sweep, dtype = _sweep(device, quick), _dtype(device)
    n, d, v = sweep.tokens, sweep.width, sweep.vocabulary
    sizes = (((n, d, v), ROWS), ((n, v, d), ROWS), ((v, n, d), CONTRACTED))
    return LoopWork(
        n,
        tuple(
            TokenProduct(Product(*size, dtype=dtype, result_bytes=dtype.itemsize), tokens_in)
            for size, tokens_in in sizes
        ),
        kernels=len(sizes),
    )


def _sweep(device: torch.device, quick: bool) -> Sweep:
    return QUICK_SWEEP if quick else Sweep() if device.type == "cpu" else LARGE_SWEEP


def _dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if _computes(torch.bfloat16, device) else torch.float16


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has products in this dtype, and not only an emulation of them."""
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _operands(sweep: Sweep, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x_ND = torch.randn(sweep.tokens, sweep.width, device=device, dtype=dtype)
    return x_ND, torch.randn(sweep.vocabulary, sweep.width, device=device, dtype=dtype)


def _rate(sweep: Sweep, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per microsecond of the largest whole product, in another dtype."""
    x_ND, w_VD = _operands(sweep, dtype, device)
    step = {dtype: lambda: x_ND @ w_VD.t()}
    seconds = timed(step, 2, warmup=1, device=device)[dtype].min_s
    return round(2 * sweep.tokens * sweep.width * sweep.vocabulary / seconds * 1e-6, 1)


def _copied_bytes_per_us(device: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    step = {size: lambda: target.copy_(source)}
    seconds = timed(step, 5, warmup=1, device=device)[size].min_s
    return round(size / seconds * 1e-6, 1)


def _products(x_ND: Tensor, w_VD: Tensor, rows: int) -> Callable[[], Tensor]:
    """A function that computes logits, input gradient and weight gradient in chunks of rows.

    As in a loop, the weight gradient is summed in float32; in one piece it is a plain product.
    """
    whole, half = rows >= x_ND.shape[0], x_ND.dtype != torch.float32
    dx_ND = torch.empty_like(x_ND)
    dw_VD = torch.zeros_like(w_VD, dtype=x_ND.dtype if whole else torch.float32)
    summed: dict[str, Any] = {"out_dtype": torch.float32} if half else {}

    def run() -> Tensor:
        for x_CD, dx_CD in zip(x_ND.split(rows), dx_ND.split(rows), strict=True):
            logits_CV = x_CD @ w_VD.t()
            torch.mm(logits_CV, w_VD, out=dx_CD)
            if whole:
                torch.mm(logits_CV.t(), x_CD, out=dw_VD)
            else:
                torch.addmm(dw_VD, logits_CV.t(), x_CD, out=dw_VD, **summed)
        return dw_VD

    return run


def _chunk_us(device: torch.device, repeats: int, tokens: int = 4096) -> float:
    """Microseconds that one more chunk adds to a compiled loop, from two loops over a tiny head."""
    torch.compiler.reset()
    head = Head.build(tokens, 16, 64, device)
    counts = (2, 66)
    steps: dict[int, Step] = {
        n: head.work().step(mst(chunk_tokens=-(-tokens // n)).build(head.loss)) for n in counts
    }
    times = timed(steps, repeats, warmup=2, device=device)
    few, many = (times[n].min_s for n in counts)
    return max(0.0, (many - few) / (counts[1] - counts[0]) * 1e6)


# ---- the benchmark -------------------------------------------------------------------------------
TIME_LIMIT, PEAK_LIMIT = 1.03, 1.10
BUDGET_0 = "mst, memory_budget=0.0"


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
    rows = comparison.measured(title, contenders, head.work(), arguments)
    result.records[f"head_{width}"] = results.records(rows)
    counts = {c.name: sizes.chunks for c in fixed} | chunks
    floors = {name: head.floor_bytes(count) for name, count in counts.items()}
    of_floor = {row.name: quotient(row.peak_bytes, floors.get(row.name)) for row in rows.values()}
    own = {
        "floor MiB": lambda row: mib_cell(floors.get(row.name)),
        "peak / floor": lambda row: times_cell(of_floor[row.name]),
    }
    columns = ("", "time / Inductor", "estimated", "peak MiB", *own)
    base = rows[INDUCTOR]
    result.tables.append(results.steps_table(title, rows.values(), base, columns, own))
    main_name = f"{MST}, {sizes.chunks} chunks"
    ratio = results.time_ratio(rows[main_name], base)
    result.targets += [
        Target(f"d={width}: time / Inductor", ratio, TIME_LIMIT),
        Target(f"d={width}: peak / floor", of_floor[main_name], PEAK_LIMIT),
    ]
    results.judge_estimates(result, f"d={width}", rows.values(), base)


def _mlps(sizes: Sizes, arguments: Arguments, result: Result) -> None:
    width = sizes.widths[0]
    mlps = MLPs.build(sizes.mlp_tokens, width, sizes.mlp_width, sizes.mlp_layers, arguments.device)
    title = (
        f"{sizes.mlp_layers} chained SwiGLU MLPs, d={width}, l={sizes.mlp_width}, "
        f"N={sizes.mlp_tokens}, fp32"
    )
    contenders = [eager(), inductor(), mst(), mst(BUDGET_0, memory_budget=0.0)]
    rows = comparison.measured(title, contenders, mlps.work(), arguments)
    columns = ("", "time / Inductor", "estimated", "peak MiB", "peak / Inductor", "chunks")
    base = rows[INDUCTOR]
    result.tables.append(results.steps_table(title, rows.values(), base, columns))
    results.judge_estimates(result, "MLPs", rows.values(), base)
    result.records["mlps"] = results.records(rows)


def _costs(arguments: Arguments, result: Result) -> None:
    device = arguments.device
    measured = measure(device, arguments.quick)
    used, products = device_costs.costs_of(device), work(device, arguments.quick)
    slowdowns = {
        "rows": lambda found: str(found[0]),
        "measured": lambda found: f"{found[1]:.2f}x",
        "in use": lambda found: f"{used.slowdown(products, found[0]):.2f}x",
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


main = Benchmark("loops", (run,), __doc__, options=("store",))
