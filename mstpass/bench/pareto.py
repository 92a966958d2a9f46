"""Measure peak and time of a Llama-like step: Inductor with torch's
partitioner at its budgets and with checkpoints, and mst at its own budgets.

The points of torch are its partitioner at several values of ``activation_memory_budget``, and
``torch.utils.checkpoint`` around each layer; both run under Inductor. The points of mst are

- the free plan, and the free plan without extra time (``free_overhead=0``);
- several relative budgets;
- for each torch point whose peak lies between mst's lowest and highest, that peak as a budget in
  bytes; for the larger model also the target's fraction of Inductor's peak.

All points are checked and timed in one run.

examples:
  mstpass bench pareto --csv pareto.csv --plots plots
  mstpass bench pareto --large --repeats 9 --plots plots
  mstpass bench pareto --quick
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mstpass.bench import peers, results
from mstpass.bench.comparison import INDUCTOR, MST, Comparison, Contender, eager, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.models import Llama, LlamaSize, Work, llama
from mstpass.bench.results import MIB, NONE, Result, Row, Table, Target
from mstpass.torch_internals.settings import torch_budget

TORCH_BUDGETS = (0.8, 0.5, 0.3, 0.1, 0.0)  # 1.0 is Inductor's default
BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.1, 0.0)  # 1.0 is mst's default
_QUICK_TORCH_BUDGETS, _QUICK_BUDGETS = (0.5,), (0.0,)
CHECKPOINT = f"{INDUCTOR}, checkpoint per layer"
LIMIT = 1.03  # relative to a torch point's peak and time
LARGE_PEAK_LIMIT, LARGE_TIME_LIMIT = 0.17, 1.20  # relative to Inductor

Rows = Sequence[Row]


def run(arguments: Arguments) -> Result:
    name = "pareto-large" if arguments.large else "pareto"
    size = LlamaSize()
    if arguments.quick or arguments.large:
        size = peers.QUICK if arguments.quick else peers.LARGE
    base, theirs, ours = _measured(size, arguments)
    every = [*theirs, *ours]
    result = Result(name, f"Peak against time, measured: {size}")
    result.tables += [results.steps_table("points", every, base), _pairs(base, theirs, ours)]
    result.targets += _targets(base, theirs, ours, arguments.large)
    results.judge_estimates(result, "mst's times", ours, base)
    result.notes += [
        "Loss and gradients equal eager's. Time: median ratio over interleaved rounds "
        "(least-greatest). A memory_budget in MiB is the measured peak of a torch point. Fastest "
        f"mst point: of those whose peak is at most {LIMIT} times the torch point's.",
        *(f"{row.name}: {row.plan or 'nothing chunked'}." for row in ours),
    ]
    result.records["rows"] = [_record(row, base) for row in every]
    if arguments.csv is not None:
        results.write_csv(arguments.csv, result.records["rows"])
    if arguments.plots is not None:
        from mstpass.bench.plots import draw_measured  # matplotlib is optional

        draw_measured(f"{size}", _series(base, theirs, ours), arguments.plots / f"{name}.png")
    return result


def _measured(size: LlamaSize, arguments: Arguments) -> tuple[Row, Rows, Rows]:
    """Measure all points: Inductor's, those of torch (Inductor is one of them), those of mst."""
    model, ids_BS, target_BS = llama(size, arguments.device)
    theirs = _torch_points(model, ids_BS, target_BS, arguments.quick)
    ours = [mst(), mst(f"{MST}, free_overhead=0", free_overhead=0.0)]
    ours += [_mst_at(budget) for budget in (_QUICK_BUDGETS if arguments.quick else BUDGETS)]
    most = 2 + 2 * len(theirs) + len(ours)
    with advancing("pareto", most * (2 + arguments.repeats)) as advance:
        work = Work.of(model, lambda: model(ids_BS, target_BS))
        comparison = Comparison(work, arguments.device, advance)
        comparison.add([eager(), *theirs, *ours])
        comparison.measure_peaks()
        rows = comparison.rows
        peaks = [rows[c.name].peak_bytes for c in theirs if not rows[c.name].error]
        if arguments.large:
            peaks.append(int(LARGE_PEAK_LIMIT * (rows[INDUCTOR].peak_bytes or 0)))
        equal = _at_peaks(peaks, [rows[c.name] for c in ours])
        comparison.add(equal)
        comparison.measure_peaks()
        comparison.time(arguments.repeats)
    rest = [rows[c.name] for c in (*ours, *equal)]
    rest.sort(key=lambda row: row.peak_bytes or math.inf, reverse=True)
    return rows[INDUCTOR], [rows[c.name] for c in theirs], rest


def _torch_points(model: Llama, ids: Any, target: Any, quick: bool) -> list[Contender]:
    def at(budget: float) -> Contender:
        name = f"{INDUCTOR}, activation_memory_budget={budget:g}"
        under = functools.partial(torch_budget, budget)
        return inductor(name, under=under)

    checkpointed = lambda: model(ids, target, checkpointed=True)
    budgets = _QUICK_TORCH_BUDGETS if quick else TORCH_BUDGETS
    return [inductor(), *map(at, budgets), inductor(CHECKPOINT, checkpointed)]


def _mst_at(budget: float | int) -> Contender:
    text = f"{budget / MIB:.1f}MiB" if isinstance(budget, int) else f"{budget:g}"
    return mst(f"{MST}, memory_budget={text}", memory_budget=budget)


def _at_peaks(peaks: Sequence[int | None], ours: Rows) -> list[Contender]:
    """mst with those peaks as budgets that lie between its own lowest and highest peak."""
    reached = [row.peak_bytes for row in ours if row.peak_bytes is not None and not row.error]
    between = {p for p in peaks if p is not None and reached and min(reached) < p < max(reached)}
    return [_mst_at(peak) for peak in sorted(between, reverse=True)]


# ---- tables, targets, picture ------------------------------------------------------------------
def _pairs(base: Row, theirs: Rows, ours: Rows) -> Table:
    """Each torch point, and the fastest mst point that needs no more memory."""
    lines = []
    for row in theirs:
        best = _fastest(ours, row, LIMIT)
        time = row.error or results.ratio_cell(results.ratios(row, base))
        peak = results.times_cell(results.peak_ratio(best, row))
        relative = (
            best.name if best else NONE,
            peak,
            results.ratio_cell(results.ratios(best, row)),
        )
        lines.append((row.name, results.mib_cell(row.peak_bytes), time, *relative))
    columns = ("torch point", "peak MiB", "time / Inductor", "fastest mst point")
    return Table("at torch's peaks", (*columns, "peak / torch's", "time / torch's"), tuple(lines))


def _fastest(ours: Rows, other: Row, peak_limit: float) -> Row | None:
    """The fastest of our points whose peak is at most ``peak_limit`` times the other's."""
    if other.peak_bytes is None:
        return None
    limit = peak_limit * other.peak_bytes
    low = [row for row in ours if row.peak_bytes is not None and row.peak_bytes <= limit]
    return min(low, key=lambda row: results.time_ratio(row, other) or math.inf, default=None)


def _targets(base: Row, theirs: Rows, ours: Rows, large: bool) -> list[Target]:
    targets = []
    for row in theirs:
        best = _fastest(ours, row, LIMIT)
        what = f"{row.name}: time of an mst point with at most {LIMIT} times its peak"
        targets.append(Target(what, results.time_ratio(best, row), LIMIT))
    if large:
        best = _fastest(ours, base, LARGE_PEAK_LIMIT)
        what = f"time / Inductor of an mst point with at most {LARGE_PEAK_LIMIT} times its peak"
        targets.append(Target(what, results.time_ratio(best, base), LARGE_TIME_LIMIT))
    return targets


def _record(row: Row, base: Row) -> dict[str, Any]:
    median, least, greatest = results.ratios(row, base) or (None, None, None)
    return {
        **vars(row),
        "median_s": row.median_s,
        "time_ratio": median,
        "least_time_ratio": least,
        "greatest_time_ratio": greatest,
        "peak_ratio": results.peak_ratio(row, base),
    }


def _series(base: Row, theirs: Rows, ours: Rows) -> dict[str, list[tuple[float, float, str]]]:
    """The points of the picture."""

    def points(rows: Iterable[Row]) -> list[tuple[float, float, str]]:
        found = ((results.time_ratio(row, base), row.peak_bytes, row.name) for row in rows)
        return [
            (time, peak / MIB, name.partition("budget=")[2])
            for time, peak, name in found
            if time is not None and peak is not None
        ]

    return {
        "Inductor, activation_memory_budget 1 to 0": points(
            row for row in theirs if row.name != CHECKPOINT
        ),
        CHECKPOINT: points(row for row in theirs if row.name == CHECKPOINT),
        "mst": points(ours),
    }


main = Benchmark("pareto", (run,), __doc__, options=("large", "csv", "plots"))
