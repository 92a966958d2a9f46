"""`mstpass bench long`: a long sequence at the least memory, with and without loops over heads.

At this length attention has the peak of the step. The least memory is measured with loops over
tokens alone (``chunk="tokens"``), and with loops over heads as well; then budgets just above it,
which cost less time. Plans of a deeper model are compared under further budgets; they are not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from mstpass import pipeline
from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import (
    INDUCTOR,
    Row,
    compare,
    inductor,
    mst,
    ratios,
    records,
)
from mstpass.bench.estimates import peaks_and_times
from mstpass.bench.models import LlamaSize, Step, llama
from mstpass.bench.tables import Result, Table, Target
from mstpass.memory.simulate_plan import StepSimulation, simulate_plan
from mstpass.options import Options
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.problem.problem import CutProblem
from mstpass.tracing.joint_graphs import trace_joint

SIZE = LlamaSize(width=512, layers=4, heads=8, mlp_width=2048, vocabulary=32_000, length=16_384)
QUICK = LlamaSize(width=64, layers=2, heads=4, mlp_width=128, vocabulary=512, length=1024)
NEAR_LEAST = (0.04, 0.06)  # shares of the memory between least and free that save most of the time
PEAK_LIMIT, TIME_LIMIT, DEVIATION_LIMIT = 0.65, 1.05, 0.03
PLANNED_LAYERS = 8
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5)  # between least and free, loops over tokens
_DESCRIPTION = """\
Measure the peak and the time of a Llama-like step with a long sequence under
memory budgets, with loops over tokens alone and with loops over heads."""
EXAMPLES = """  mstpass bench long --repeats 3
  mstpass bench long --quick
"""


def run(arguments: Arguments) -> Result:
    size = QUICK if arguments.quick else SIZE
    model, ids, labels = llama(size, arguments.device)
    loss_fn = lambda: model(ids, labels)
    contenders = [
        inductor(),
        mst(_name(0.0, heads=False), memory_budget=0.0, chunk="tokens"),
        *(mst(_name(budget), memory_budget=budget) for budget in (0.0, *NEAR_LEAST)),
    ]
    with Progress("long", len(contenders) * (2 + arguments.repeats)) as advance:
        rows = compare(
            contenders,
            loss_fn,
            lambda fn: Step(fn, list(model.parameters())),
            repeats=arguments.repeats,
            device=arguments.device,
            advance=advance,
        )
    result = Result("long", f"A long sequence: {size}")
    result.tables.append(peaks_and_times("steps", list(rows.values()), rows[INDUCTOR]))
    result.targets += _targets(rows)
    result.notes.append(
        "Time: median ratio to Inductor over interleaved rounds (least-greatest). The targets "
        "compare the steps at memory_budget=0.0 with and without loops over heads."
    )
    result.records["rows"] = records(rows)
    planned = dataclasses.replace(size, layers=2 if arguments.quick else PLANNED_LAYERS)
    table, slowest = _planned(planned)
    result.tables.append(table)
    result.targets.append(Target("planned time / without loops over heads, at most", slowest, 1.0))
    return result


def _planned(size: LlamaSize) -> tuple[Table, float]:
    """Plans with and without loops over heads, and their greatest ratio of times."""
    tokens, heads = problem_of(size, "tokens"), problem_of(size, "auto")
    free, least = _step(tokens, None), _step(tokens, 0)
    lines, times = [], []
    for share in SHARES:
        limit = int(_peak(least) + share * (_peak(free) - _peak(least)))
        before, after = _step(tokens, limit), _step(heads, limit)
        times.append(after.us / before.us)
        lines.append(
            (
                tables.mib_cell(limit),
                tables.mib_cell(_peak(before)),
                tables.times_cell(before.us / free.us),
                tables.mib_cell(_peak(after)),
                tables.times_cell(after.us / free.us),
                f"{times[-1]:.3f}x",
            )
        )
    own_least = _step(heads, 0)
    for share in (*reversed(NEAR_LEAST), 0.0):
        limit = int(_peak(own_least) + share * (_peak(free) - _peak(own_least)))
        after = _step(heads, limit) if share else own_least
        cells = tables.mib_cell(_peak(after)), tables.times_cell(after.us / free.us)
        lines.append((tables.mib_cell(limit), "none", "-", *cells, "-"))
    columns = (
        *("budget MiB", "peak MiB, loops over tokens alone", "time / free plan"),
        *("peak MiB, over heads too", "time / free plan", "of the time without"),
    )
    return Table(f"planned, not run: {size}", columns, tuple(lines)), round(max(times), 3)


def problem_of(size: LlamaSize, chunk: str) -> CutProblem:
    """The partition problem of the step, with what ``chunk`` lets regions loop over."""
    model, ids, labels = llama(size, torch.device("cpu"))
    options = Options(memory_budget=0.0, chunk=chunk)
    planned = trace_joint(
        model,
        (ids, labels),
        lambda module, outputs: pipeline.run(
            module, options, num_fwd_outputs=outputs, stop_after="plan"
        ),
    )
    assert planned.problem is not None
    return planned.problem


def _step(problem: CutProblem, limit_bytes: int | None) -> StepSimulation:
    return simulate_plan(problem, SOLVERS[AUTO](problem, limit_bytes))


def _peak(step: StepSimulation) -> int:
    return step.lowered_peak_bytes


def _name(budget: float, heads: bool = True) -> str:
    return f"mst, memory_budget={budget:g}" + ("" if heads else ', chunk="tokens"')


def _targets(rows: Mapping[str, Row]) -> list[Target]:
    ours, base = rows[_name(0.0)], rows[_name(0.0, heads=False)]
    ratio, peak = ratios(ours, base), tables.quotient(ours.peak_bytes, base.peak_bytes)
    simulated = tables.quotient(ours.peak_bytes, ours.simulated_bytes)
    return [
        Target("peak / without loops over heads", peak, PEAK_LIMIT),
        Target("time / without loops over heads", ratio and ratio[0], TIME_LIMIT),
        Target("|measured / simulated - 1|", simulated and abs(simulated - 1), DEVIATION_LIMIT),
    ]


main = Command("long", (run,), _DESCRIPTION, EXAMPLES)
