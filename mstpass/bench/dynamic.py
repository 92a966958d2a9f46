"""Run a Llama-like step at many sequence lengths in turn: count the
compilations, and compare times with those of a static graph for each
length.

torch.compile compiles the first length as a constant, and makes the length symbolic when it
changes. A backend that adds guards on the symbolic length would compile for every new length. Times
are compared with those of static graphs, each compiled for one length.

A second part measures the peak at every length: one function of symbolic length, first called with
a short batch, against a static graph for each length; and a walk through random lengths under a
budget in bytes.

examples:
  mstpass bench dynamic
  mstpass bench dynamic --repeats 9 --markdown docs/results/dynamic.md
  mstpass bench dynamic --steps 1000      a longer walk: hours, at 5 to 15 s a step
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import mstpass
from mstpass.bench import results
from mstpass.bench.comparison import INDUCTOR, MST, own_code
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.models import Llama, LlamaSize, Step, llama
from mstpass.bench.results import Result, Row, Table, Target
from mstpass.measure import peak_bytes, timed
from mstpass.torch_internals.caches import counters, fresh_cache
from mstpass.torch_internals.settings import recompilation_fails

PEAK_SIZE = LlamaSize(length=16_384)
QUICK_PEAK_SIZE = LlamaSize(width=64, layers=1, mlp_width=256, vocabulary=2048, length=1024)
_PEAK_LENGTHS, _QUICK_PEAK_LENGTHS = (300, 1024, 4096), (70, 256, 1024)
_BUDGETS: tuple[str | float, ...] = ("free", 0.0)
_PEAK_LIMIT = 1.03  # of a static graph's
_WALK_STEPS, _QUICK_STEPS = 60, 4
_SHORTEST = 256
_WALK_BYTES, _QUICK_BYTES = 150 * 2**20, 4 * 2**20
_MOST_PLANS = 4


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """Batches of one model, of any length."""

    model: Llama
    ids_BS: Tensor
    target_BS: Tensor

    def compiled(self, **how: Any) -> Callable[..., Tensor]:
        def loss(ids: Tensor, target: Tensor) -> Tensor:
            value: Tensor = self.model(ids, target)
            return value

        return torch.compile(own_code(loss), **how)

    def with_mst(self, dynamic: bool, **options: Any) -> Callable[..., Tensor]:
        return self.compiled(backend="mst", dynamic=dynamic, options=options)

    def step(self, fn: Callable[..., Tensor], length: int) -> Step:
        ids, target = (x[:, :length].contiguous() for x in (self.ids_BS, self.target_BS))
        return Step(lambda: fn(ids, target), list(self.model.parameters()))

    def peak_bytes(self, fn: Callable[..., Tensor], length: int) -> int:
        """The measured peak of a step; of a second one, if the first one compiles."""
        step, device, plans = self.step(fn, length), self.ids_BS.device, len(mstpass.reports())
        found = peak_bytes(step, device)
        return found if len(mstpass.reports()) == plans else peak_bytes(step, device)


def run_lengths(arguments: Arguments) -> Result:
    size = QUICK_PEAK_SIZE if arguments.quick else PEAK_SIZE
    lengths = _QUICK_PEAK_LENGTHS if arguments.quick else _PEAK_LENGTHS
    batches = _Lengths(*llama(size, arguments.device))
    result = Result("lengths", f"The peak at every length: {size}")
    steps = arguments.steps or (_QUICK_STEPS if arguments.quick else _WALK_STEPS)
    total = 2 * len(_BUDGETS) * len(lengths) + steps
    torch.compiler.reset()
    with fresh_cache(), advancing("dynamic", total) as advance:
        result.tables.append(_against_static(batches, lengths, result, advance))
        budget = _QUICK_BYTES if arguments.quick else _WALK_BYTES
        result.tables.append(_walk(batches, size.length, steps, budget, result, advance))
    return result


def _against_static(
    batches: _Lengths,
    lengths: Sequence[int],
    result: Result,
    advance: Callable[[str], None],
) -> Table:
    lines = []
    worst = 0.0
    for budget in _BUDGETS:
        symbolic = batches.with_mst(True, memory_budget=budget, strict=True)
        for length in lengths:
            ours = batches.peak_bytes(symbolic, length)
            advance("symbolic")
            static = batches.with_mst(False, memory_budget=budget, strict=True)
            theirs = batches.peak_bytes(static, length)
            advance("static")
            worst = max(worst, ours / theirs)
            cells = (
                results.mib_cell(ours),
                results.mib_cell(theirs),
                results.times_cell(ours / theirs),
            )
            lines.append((str(budget), str(length), *cells))
    result.targets.append(Target("symbolic / static peak, the worst", worst, _PEAK_LIMIT))
    result.notes.append("Symbolic: one function, called with the lengths of the table in turn.")
    columns = ("memory_budget", "length", "symbolic MiB", "static MiB", "symbolic / static")
    return Table("peaks", columns, tuple(lines))


def _walk(
    batches: _Lengths,
    longest: int,
    steps: int,
    budget_bytes: int,
    result: Result,
    advance: Callable[[str], None],
) -> Table:
    """Random lengths, the logarithm uniform, under a budget in bytes."""
    draw = random.Random(0)
    fn = batches.with_mst(True, memory_budget=budget_bytes)
    plans_before, above = len(mstpass.reports()), 0
    peaks: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengths at which the budget cannot be met
        for _ in range(steps):
            shortest = min(_SHORTEST, longest // 4)
            length = int(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
            peaks[length] = batches.peak_bytes(fn, length)
            advance("walk")
    plans = mstpass.reports()[plans_before:]
    above = sum(peak > budget_bytes for peak in peaks.values())
    held = [length for length, peak in peaks.items() if peak <= budget_bytes]
    result.targets.append(Target("plans of the walk", float(len(plans)), float(_MOST_PLANS)))
    result.notes.append(
        f"Walk: {steps} lengths from {min(peaks)} to {max(peaks)}, memory_budget of "
        f"{budget_bytes // 2**20} MiB."
    )
    result.records["walk"] = dict(sorted(peaks.items()))
    cells = str(len(plans)), str(len(held)), str(max(held, default=0)), str(above)
    columns = ("plans", "steps within the budget", "the longest of them", "steps above it")
    return Table("walk", columns, (cells,))


# ---- compilations and times ----------------------------------------------------------------------
TIME_LIMIT = 1.05
_SIZE = LlamaSize(layers=2)
_LENGTHS = (1500, 2048, 1111, 1999, 1024, 1733, 1280, 2011, 1361, 1920)
_QUICK_SIZE = LlamaSize(width=64, layers=1, mlp_width=256, vocabulary=2048)
_QUICK_LENGTHS = (640, 1024, 701, 997)
_STATIC = 3  # the first lengths, for each of which a static graph is compiled too


def _ways(lengths: Sequence[int]) -> dict[str, tuple[dict[str, Any], Sequence[int]]]:
    """By name: how the step is compiled, and the lengths that it runs."""
    ours: dict[str, Any] = {"backend": "mst", "options": {"strict": True}}
    static = lengths[:_STATIC]
    return {
        INDUCTOR: ({}, lengths),
        MST: (ours, lengths),
        f"{INDUCTOR}, static": ({"dynamic": False}, static),
        f"{MST}, static": ({"dynamic": False, **ours}, static),
    }


def run(arguments: Arguments) -> Result:
    size, lengths = (_QUICK_SIZE, _QUICK_LENGTHS) if arguments.quick else (_SIZE, _LENGTHS)
    device, ways = arguments.device, _ways(lengths)
    batches = _Lengths(*llama(size, device))
    rows = {name: Row(name) for name in ways}
    steps: dict[str, dict[int, Step]] = {}
    graphs: dict[str, int] = {}
    total = sum(len(own) for _, own in ways.values()) + arguments.repeats * len(ways)
    torch.compiler.reset()
    with fresh_cache(), advancing("dynamic", total) as advance:
        for name, (how, own) in ways.items():
            fn = batches.compiled(**how)
            steps[name] = {n: batches.step(fn, n) for n in own}
            graphs[name] = _compilations(steps[name], functools.partial(advance, name))
        for _ in range(arguments.repeats):
            gc.collect()
            with recompilation_fails():
                each = [_timed_in_turn(steps, n, device) for n in lengths[:_STATIC]]
            for name, row in rows.items():
                row.seconds.append(sum(seconds[name] for seconds in each))
                advance(name)
        for name, row in rows.items():
            row.peak_bytes = peak_bytes(steps[name][max(lengths[:_STATIC])], device)
    return _result(size, lengths, rows, graphs)


def _timed_in_turn(
    steps: Mapping[str, Mapping[int, Step]], length: int, device: torch.device
) -> dict[str, float]:
    found = timed({name: own[length] for name, own in steps.items()}, 1, warmup=0, device=device)
    return {name: timing.median_s for name, timing in found.items()}


def _compilations(steps: dict[int, Step], advance: Callable[[], None]) -> int:
    before = counters["stats"]["unique_graphs"]
    for step in steps.values():
        step()
        advance()
    return int(counters["stats"]["unique_graphs"] - before)


def _result(
    size: LlamaSize, lengths: Sequence[int], rows: Mapping[str, Row], graphs: Mapping[str, int]
) -> Result:
    result = Result(
        "dynamic",
        f"{len(lengths)} sequence lengths in turn: d={size.width}, L={size.layers}, "
        f"l={size.mlp_width}, V={size.vocabulary}, fp32",
    )
    static = {name: rows[f"{name.removesuffix(', static')}, static"] for name in rows}
    counts = {
        name: f"{graphs[name]} for {len(own)} lengths" for name, (_, own) in _ways(lengths).items()
    }
    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: row.name,
        "compilations": lambda row: counts[row.name],
        "time / its static graphs": lambda row: results.ratio_cell(
            results.ratios(row, static[row.name])
        ),
        "peak MiB": lambda row: results.mib_cell(row.peak_bytes),
    }
    result.tables.append(Table.of("steps", rows.values(), columns))
    result.targets += [
        Target("compilations / Inductor's", results.quotient(graphs[MST], graphs[INDUCTOR]), 1.0),
        Target("time / static graphs", results.time_ratio(rows[MST], static[MST]), TIME_LIMIT),
    ]
    result.notes.append(
        f"Lengths {', '.join(map(str, lengths))}. Time: median ratio over rounds (least-greatest) "
        f"of the sum over the first {_STATIC} lengths; peak at the longest of them."
    )
    result.records["rows"] = results.records(rows)
    return result


main = Benchmark("dynamic", (run, run_lengths), __doc__, options=("steps",))
