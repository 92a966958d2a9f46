"""`mstpass bench budgets`: memory budgets in bytes, and the peaks under them.

The budgets of a model lie, in equal steps, between the peak of its plan of least memory as Inductor
schedules it, and the peak of its free plan. The *simulated* peak is that of the report, the
*measured* peak that of a step. Each budget has a compiled step, whose loss and gradients are
compared with those of eager. With dropout they are compared with those of Inductor at the same
seed, because eager draws other masks than compiled code.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mstpass
from mstpass.bench import output, tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.budget_models import MODELS, Model
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import (
    Comparison,
    Contender,
    Row,
    eager,
    inductor,
    mst,
    own_code,
)
from mstpass.bench.record import problem_of
from mstpass.bench.tables import MIB, Result, Table, Target
from mstpass.errors import UserError, require
from mstpass.limit import MEASURED_OVER_SIMULATED
from mstpass.partition.budget import memory_of
from mstpass.partition.solvers import AUTO, SOLVERS

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_QUICK_SHARES = (1.0, 0.0)
PEAK_LIMIT, DEVIATION_LIMIT = 1.0, 0.05  # measured / budget, |measured / simulated - 1|
STEP_LIMIT = 1.0  # a smaller budget must not have a higher peak
_APART = 0.01  # of budgets that are closer to each other, one is tried
_DESCRIPTION = """\
Compile steps of many models under memory budgets in bytes, and compare
their measured peaks with the budgets and with the simulated peaks."""
EXAMPLES = """  mstpass bench budgets --csv budgets.csv
  mstpass bench budgets --model llama --model "BERT, dropout"
  mstpass bench budgets --quick
"""


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
        return tables.quotient(self.measured_bytes, self.budget_bytes)

    @property
    def deviation(self) -> float | None:
        """The measured peak's excess over the simulated one, as a fraction of the latter."""
        ratio = tables.quotient(self.measured_bytes, self.simulated_bytes)
        return None if ratio is None else ratio - 1


def _model_list() -> str:
    return "\n".join(["models:", *(f"  {name}" for name in MODELS)])


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench budgets")
    names = list(arguments.model) or list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UserError(f"--model {unknown[0]!r} is unknown; choose from: {'; '.join(MODELS)}")
    shares = _QUICK_SHARES if arguments.quick else SHARES
    points: list[Point] = []
    with Progress("budgets", len(names) * 2 * (1 + len(shares))) as advance:
        for name in names:
            try:
                model = MODELS[name](arguments.device, arguments.quick)
                points += points_of(name, model, shares, arguments.device, advance)
            except Exception as error:  # the other models are still measured
                text = f"{type(error).__name__}: {error}"
                points.append(Point(name, 0.0, 0, None, None, None, "", text))
            if arguments.csv is not None:
                output.write_csv(arguments.csv, [_record(point) for point in points])
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
    model: Model,
    shares: Sequence[float],
    device: torch.device,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Point]:
    budgets = budgets_of(model, shares)
    comparison = Comparison(
        model.loss_fn,
        model.make_step,
        device,
        advance,
        value_tolerance=model.value_tolerance,
        gradient_tolerance=model.gradient_tolerance,
    )
    contenders = {share: _contender(name, budget) for share, budget in budgets.items()}
    comparison.add([inductor() if model.random else eager(), *contenders.values()])
    comparison.measure_peaks()
    return [
        _point(name, share, budgets[share], comparison.rows[contender.name])
        for share, contender in contenders.items()
    ]


def budgets_of(model: Model, shares: Sequence[float]) -> dict[float, int]:
    """Budgets in bytes, by share.

    A budget is larger than the peak at its share by the reserve that the planner keeps (`SPARE`).
    The lowest is the peak of the plan of least memory as Inductor schedules it: lower budgets are
    refused.
    """
    problem = problem_of(model.loss_fn, memory_budget=0.5)
    highest = memory_of(problem, SOLVERS[AUTO](problem, None)).peak_bytes
    lowest = min(_lowest_bytes(model), highest)
    budgets: dict[float, int] = {}
    for share in shares:
        budget = math.ceil(MEASURED_OVER_SIMULATED * (lowest + share * (highest - lowest))) + 1
        if all(abs(budget - other) > _APART * other for other in budgets.values()):
            budgets[share] = budget
    return budgets


def _lowest_bytes(model: Model) -> int:
    options: dict[str, Any] = {"memory_budget": 0.0, "strict": True}
    model.make_step(torch.compile(own_code(model.loss_fn), backend="mst", options=options))()
    peak_bytes = mstpass.reports()[-1].peak_bytes
    assert peak_bytes is not None
    return peak_bytes


def _contender(name: str, budget: int) -> Contender:
    return mst(f"{name}, memory_budget={budget / MIB:.2f}MiB", memory_budget=budget)


def _point(name: str, share: float, budget: int, row: Row) -> Point:
    return Point(
        model=name,
        share=share,
        budget_bytes=budget,
        simulated_bytes=row.simulated_bytes,
        measured_bytes=row.peak_bytes,
        gradient_error=row.gradient_error,
        plan=row.plan,
        error=row.error,
    )


def _record(point: Point) -> dict[str, Any]:
    return {**vars(point), "of_budget": point.of_budget, "deviation": point.deviation}


# ---- tables and targets ------------------------------------------------------------------------
def _table(points: Sequence[Point]) -> Table:
    lines = tuple(
        (
            p.model,
            f"{p.share:.2f}",
            tables.mib_cell(p.budget_bytes),
            tables.mib_cell(p.simulated_bytes),
            tables.mib_cell(p.measured_bytes),
            "-" if p.deviation is None else f"{100 * p.deviation:+.1f} %",
            "-" if p.of_budget is None else "met" if p.of_budget <= PEAK_LIMIT else "missed",
            "-" if p.gradient_error is None else f"{p.gradient_error:.1e}",
        )
        for p in points
    )
    columns = (
        "model", "share", "budget MiB", "simulated MiB", "measured MiB", "measured / simulated",
        "budget", "gradient error",
    )  # fmt: skip
    return Table("budgets", columns, lines)


def _targets(name: str, points: Sequence[Point]) -> list[Target]:
    own = [p for p in points if p.model == name]
    deviations = [p.deviation and abs(p.deviation) for p in own]
    falling = sorted(own, key=lambda p: -p.budget_bytes)
    return [
        Target(f"{name}: measured peak / budget", _worst([p.of_budget for p in own]), PEAK_LIMIT),
        Target(f"{name}: |measured / simulated - 1|", _worst(deviations), DEVIATION_LIMIT),
        Target(f"{name}: peak / that of a larger budget", _worst(_steps(falling)), STEP_LIMIT),
    ]


def _steps(falling: Sequence[Point]) -> list[float | None]:
    """The ratio of each budget's peak to that of the next larger budget."""
    peaks = [point.measured_bytes for point in falling]
    pairs = itertools.pairwise(peaks)
    return [1.0, *(tables.quotient(less, more) for more, less in pairs)]


def _worst(values: Sequence[float | None]) -> float | None:
    """The greatest value; None if a value is missing."""
    known = [value for value in values if value is not None]
    return max(known, default=None) if len(known) == len(values) else None


main = Command(
    "budgets", (run,), f"{_DESCRIPTION}\n\n{_model_list()}", EXAMPLES, extra=("model", "csv")
)
