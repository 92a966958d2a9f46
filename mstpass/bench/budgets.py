"""Compile steps of many models under memory budgets in bytes, and compare
their measured peaks with the budgets and with the simulated peaks.

The budgets of a model lie, in equal steps, between the peak of its plan of least memory as Inductor
schedules it, and the peak of its free plan. The *simulated* peak is that of the report, the
*measured* peak that of a step. Each budget has a compiled step, whose loss and gradients are
compared with those of eager. With dropout they are compared with those of Inductor at the same
seed, because eager draws other masks than compiled code.

examples:
  mstpass bench budgets --csv budgets.csv
  mstpass bench budgets --model llama --model "BERT, dropout"
  mstpass bench budgets --quick
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import mstpass
from mstpass.bench import losses, peers, results
from mstpass.bench.comparison import Comparison, eager, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.huggingface import Case, Scale, loss_of, sized, workload
from mstpass.bench.models import Head, LlamaSize, MLPs, Work, llama
from mstpass.bench.record import problem_of
from mstpass.bench.results import MIB, Result, Table, Target, mib_cell, quotient, text_of
from mstpass.errors import require
from mstpass.limit import MEASURED_OVER_SIMULATED
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers import AUTO, SOLVERS

_AUTOCAST_TOLERANCES = 0.05, 0.05
_SEED = 1


Build = Callable[[torch.device, bool], Work]  # takes the device, and whether sizes are tiny


def _llama(size: LlamaSize) -> Build:
    def build(device: torch.device, quick: bool) -> Work:
        model, ids_BS, target_BS = llama(peers.QUICK if quick else size, device)
        return Work.of(model, lambda: model(ids_BS, target_BS))

    return build


def _head(loss: losses.Loss) -> Build:
    def build(device: torch.device, quick: bool) -> Work:
        head = Head.build(*losses.sizes(quick), device)
        return head.work(losses.on_head(head, loss))

    return build


def _mlps(device: torch.device, quick: bool) -> Work:
    mlps = MLPs.build(*((1024, 64, 256, 2) if quick else (4096, 256, 1024, 3)), device)
    # The loss makes the tangent inside the step, as in a model: so it is a part of the peak.
    return mlps.work(tangent=None, loss=lambda value: value.square().mean())


def _huggingface(case: Case, size: Scale) -> Build:
    def build(device: torch.device, quick: bool) -> Work:
        model, ids = workload(case, sized(64, 2, 192, 512, 2, 256) if quick else size, device)
        loss, seed = loss_of(case, model), _SEED if case.dropout else None
        more = {"tolerances": _AUTOCAST_TOLERANCES} if case.autocast else {}
        return Work.of(model, lambda: loss(ids), seed=seed, **more)

    return build


_GPT2 = sized(layers=4, mlp_width=1024, vocabulary=16_000)
MODELS: Mapping[str, Build] = {
    "llama": _llama(LlamaSize()),
    "llama, large": _llama(peers.LARGE),
    "MLPs": _mlps,
    **{f"head, {name}": _head(loss) for name, loss in losses.LOSSES.items()},
    "GPT-2": _huggingface(Case("GPT-2", "gpt2", autocast=False), _GPT2),
    "GPT-2, dropout": _huggingface(Case("GPT-2", "gpt2", autocast=False, dropout=0.1), _GPT2),
    "OLMo-2": _huggingface(Case("OLMo-2", "olmo2", autocast=False), sized()),
    "OLMo-2, autocast": _huggingface(Case("OLMo-2", "olmo2", autocast=True), sized()),
    "BERT": _huggingface(Case("BERT", "bert", autocast=False), sized()),
    "BERT, dropout": _huggingface(Case("BERT", "bert", autocast=False, dropout=0.1), sized()),
}


# ---- budgets -------------------------------------------------------------------------------------
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_QUICK_SHARES = (1.0, 0.0)
PEAK_LIMIT, DEVIATION_LIMIT = 1.0, 0.05  # measured / budget, |measured / simulated - 1|
STEP_LIMIT = 1.0  # a smaller budget must not have a higher peak
_APART = 0.01  # of budgets that are closer to each other, one is tried


@dataclasses.dataclass(frozen=True)
class Point:
    """One model at one budget.

    Attributes:
        share: where the budget lies between the lowest peak (0) and the free plan's peak (1).
        gradient_error: the largest relative error of a gradient.
        plan: mst's loops, as text.
    """

    model: str
    share: float
    budget_bytes: int
    simulated_bytes: int | None
    measured_bytes: int | None
    gradient_error: float | None
    plan: str
    error: str

    @property
    def of_budget(self) -> float | None:
        return quotient(self.measured_bytes, self.budget_bytes)

    @property
    def deviation(self) -> float | None:
        """The measured peak's excess over the simulated one, as a fraction of the latter."""
        ratio = quotient(self.measured_bytes, self.simulated_bytes)
        return None if ratio is None else ratio - 1


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench budgets")
    names = arguments.models(MODELS)
    shares = _QUICK_SHARES if arguments.quick else SHARES
    points: list[Point] = []
    with advancing("budgets", len(names) * 2 * (1 + len(shares))) as advance:
        for name in names:
            try:
                model = MODELS[name](arguments.device, arguments.quick)
                points += points_of(name, model, shares, arguments.device, advance)
            except Exception as error:  # the other models are still measured
                text = f"{type(error).__name__}: {error}"
                points.append(Point(name, 0.0, 0, None, None, None, "", text))
            if arguments.csv is not None:
                results.write_csv(arguments.csv, [_record(point) for point in points])
    result = Result("budgets", f"Budgets in bytes of {len(names)} models")
    result.tables.append(_table(points))
    result.targets += [target for name in names for target in _targets(name, points)]
    result.notes += [
        "Share: where the budget lies between the peak of the plan of least memory (0) and that "
        f"of the free plan (1); of budgets within {100 * _APART:.0f} % of each other one is tried. "
        "Gradient error: the largest relative error of a gradient against eager, with dropout "
        "against Inductor at the same seed.",
        *(f"{p.model}, {p.share:.2f}: {p.error}" for p in points if p.error),
    ]
    result.records["rows"] = [_record(point) for point in points]
    return result


def points_of(
    name: str,
    model: Work,
    shares: Sequence[float],
    device: torch.device,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Point]:
    budgets = budgets_of(model, shares)
    comparison = Comparison(model, device, advance)
    ours = {
        share: mst(f"{name}, memory_budget={budget / MIB:.2f}MiB", memory_budget=budget)
        for share, budget in budgets.items()
    }
    comparison.add([eager() if model.seed is None else inductor(), *ours.values()])
    comparison.measure_peaks()
    found = [(share, comparison.rows[contender.name]) for share, contender in ours.items()]
    return [
        Point(
            model=name,
            share=share,
            budget_bytes=budgets[share],
            simulated_bytes=row.simulated_bytes,
            measured_bytes=row.peak_bytes,
            gradient_error=row.gradient_error,
            plan=row.plan,
            error=row.error,
        )
        for share, row in found
    ]


def budgets_of(model: Work, shares: Sequence[float]) -> dict[float, int]:
    """Budgets in bytes, by share.

    A budget is larger than the peak at its share by the reserve that the planner keeps (`SPARE`).
    The lowest is the peak of the plan of least memory as Inductor schedules it: lower budgets are
    refused.
    """
    problem = problem_of(model.fn, memory_budget=0.5)
    highest = simulate_plan(problem, SOLVERS[AUTO](problem, None)).peak_bytes
    lowest = min(_lowest_bytes(model), highest)
    budgets: dict[float, int] = {}
    for share in shares:
        budget = math.ceil(MEASURED_OVER_SIMULATED * (lowest + share * (highest - lowest))) + 1
        if all(abs(budget - other) > _APART * other for other in budgets.values()):
            budgets[share] = budget
    return budgets


def _lowest_bytes(model: Work) -> int:
    model.step(mst(memory_budget=0.0).build(model.fn))()
    peak_bytes = mstpass.reports()[-1].peak_bytes
    assert peak_bytes is not None, "the peak bytes are known"
    return peak_bytes


def _record(point: Point) -> dict[str, Any]:
    return {**vars(point), "of_budget": point.of_budget, "deviation": point.deviation}


# ---- tables and targets ------------------------------------------------------------------------
def _table(points: Sequence[Point]) -> Table:
    columns: dict[str, Callable[[Point], str]] = {
        "model": lambda p: p.model,
        "share": lambda p: f"{p.share:.2f}",
        "budget MiB": lambda p: mib_cell(p.budget_bytes),
        "simulated MiB": lambda p: mib_cell(p.simulated_bytes),
        "measured MiB": lambda p: mib_cell(p.measured_bytes),
        "measured / simulated": lambda p: text_of(p.deviation, lambda off: f"{100 * off:+.1f} %"),
        "budget": lambda p: text_of(p.of_budget, lambda r: "met" if r <= PEAK_LIMIT else "missed"),
        "gradient error": lambda p: text_of(p.gradient_error, "{:.1e}".format),
    }
    return Table.of("budgets", points, columns)


def _targets(name: str, points: Sequence[Point]) -> list[Target]:
    own = [p for p in points if p.model == name]
    deviations = [p.deviation and abs(p.deviation) for p in own]
    falling = [p.measured_bytes for p in sorted(own, key=lambda p: -p.budget_bytes)]
    steps = [1.0, *(quotient(less, more) for more, less in itertools.pairwise(falling))]
    return [
        Target(f"{name}: measured peak / budget", _worst([p.of_budget for p in own]), PEAK_LIMIT),
        Target(f"{name}: |measured / simulated - 1|", _worst(deviations), DEVIATION_LIMIT),
        Target(f"{name}: peak / that of a larger budget", _worst(steps), STEP_LIMIT),
    ]


def _worst(values: Sequence[float | None]) -> float | None:
    """The greatest value; None if a value is missing."""
    known = [value for value in values if value is not None]
    return max(known, default=None) if len(known) == len(values) else None


_NAMES = "\n".join(["models:", *(f"  {name}" for name in MODELS)])
_TEXT = f"{__doc__}".replace("examples:", f"{_NAMES}\n\nexamples:")
main = Benchmark("budgets", (run,), _TEXT, options=("model", "csv"))
