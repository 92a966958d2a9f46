"""The second part of `mstpass bench dynamic`: the peak at every length.

One function of symbolic length, first called with a short batch, against a static graph for each
length; and a walk through random lengths under a budget in bytes.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import mstpass
from mstpass.bench.comparison import own_code
from mstpass.bench.harness import Arguments, Progress
from mstpass.bench.models import Llama, LlamaSize, Step, llama
from mstpass.bench.results import Result, Table, Target, mib_cell, times_cell
from mstpass.measure import peak_bytes
from mstpass.torch_internals.caches import fresh_cache

SIZE = LlamaSize(length=16_384)
QUICK_SIZE = LlamaSize(width=64, layers=1, mlp_width=256, vocabulary=2048, length=1024)
_LENGTHS, _QUICK_LENGTHS = (300, 1024, 4096), (70, 256, 1024)
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

    def compiled(self, dynamic: bool, **options: Any) -> Callable[..., Tensor]:
        def loss(ids: Tensor, target: Tensor) -> Tensor:
            value: Tensor = self.model(ids, target)
            return value

        return torch.compile(own_code(loss), backend="mst", dynamic=dynamic, options=options)

    def peak_bytes(self, fn: Callable[..., Tensor], length: int) -> int:
        """The measured peak of a step; of a second one, if the first one compiles."""
        ids, target = (x[:, :length].contiguous() for x in (self.ids_BS, self.target_BS))
        step = Step(lambda: fn(ids, target), list(self.model.parameters()))
        plans = len(mstpass.reports())
        found = peak_bytes(step, ids.device)
        return found if len(mstpass.reports()) == plans else peak_bytes(step, ids.device)


def run(arguments: Arguments) -> Result:
    size = QUICK_SIZE if arguments.quick else SIZE
    lengths = _QUICK_LENGTHS if arguments.quick else _LENGTHS
    batches = _Lengths(*llama(size, arguments.device))
    result = Result("lengths", f"The peak at every length: {size}")
    steps = arguments.steps or (_QUICK_STEPS if arguments.quick else _WALK_STEPS)
    total = 2 * len(_BUDGETS) * len(lengths) + steps
    torch.compiler.reset()
    with fresh_cache(), Progress("dynamic", total) as advance:
        result.tables.append(_against_static(batches, lengths, result, advance))
        budget = _QUICK_BYTES if arguments.quick else _WALK_BYTES
        result.tables.append(_walk(batches, size.length, steps, budget, result, advance))
    return result


def _against_static(
    batches: _Lengths, lengths: Sequence[int], result: Result, advance: Callable[[str], None]
) -> Table:
    lines = []
    worst = 0.0
    for budget in _BUDGETS:
        symbolic = batches.compiled(True, memory_budget=budget, strict=True)
        for length in lengths:
            ours = batches.peak_bytes(symbolic, length)
            advance("symbolic")
            static = batches.compiled(False, memory_budget=budget, strict=True)
            theirs = batches.peak_bytes(static, length)
            advance("static")
            worst = max(worst, ours / theirs)
            cells = mib_cell(ours), mib_cell(theirs), times_cell(ours / theirs)
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
    fn = batches.compiled(True, memory_budget=budget_bytes)
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
