"""Run one case, and say what is wrong with it.

A program that eager mode cannot run is *invalid*. A failure is ours only if the same program, split
by torch's own partitioner and run in the same way, does not fail; a wrong value must be wrong with
other parameters and inputs too, as a rounding that turns a ReLU the other way is no error.
"""

from __future__ import annotations

import dataclasses
import gc
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

import mstpass
from mstpass.fuzz.case import Case
from mstpass.fuzz.compiled import Recording, by_inductor, fast, forced_loops
from mstpass.fuzz.graphs import check_graphs
from mstpass.fuzz.plans import Failure, broken_budgets, broken_peak, broken_promises
from mstpass.fuzz.program import (
    Compile,
    DrawInFloat32,
    Inputs,
    Program,
    References,
    Values,
    wrong_values,
)
from mstpass.hook_checks import SCHEDULE_HOOK
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.report.report import Report

FAST, INDUCTOR = "fast", "inductor"


@dataclasses.dataclass(frozen=True)
class Checked:
    """What became of one case.

    Attributes:
        status: "held", "failed", "invalid" (eager cannot run it) or "torch fails" (without us).
        facts: what the plans did, for the summary: how many regions of each mode, and so on; and
            (fast kind) how many plans were checked.
        peaks: (under Inductor, where the step returns its loss alone) bytes of the simulated, the
            scheduled and the measured peak.
    """

    status: str
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    facts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    peaks: tuple[int, int, int] | None = None
    seconds: float = 0.0


def check_case(case: Case, kind: str = FAST) -> Checked:
    """Run a case, and say what is wrong with it."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checked = check_program(Program.of(case), kind)
    gc.collect(1)
    return dataclasses.replace(checked, seconds=round(time.perf_counter() - start, 2))


def hold(model: Callable[[], nn.Module], inputs: Inputs, kind: str = FAST, **setup: Any) -> None:
    """Check a program, as a test.

    Args:
        setup: the fields of ``Case`` for the call and the options that are not plain.

    Raises:
        AssertionError: a value is wrong, a promise is broken, or mstpass fails.
    """
    checked = check_program(Program(model, inputs, Case(**setup)), kind)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))


def check_program(program: Program, kind: str = FAST) -> Checked:
    """Run a program by one kind, and compare."""
    try:
        references = _references(program, kind, seed=0)
    except Exception as error:
        return Checked("invalid", reason=_text(error))
    try:
        with forced_loops(program.setup):
            ran = (_run_fast if kind == FAST else _run_inductor)(program)
    except Exception as error:
        return _crashed(program, kind, error)
    failures = ran.failures
    if wrong := wrong_values(ran.values, references, program.setup):
        failures += _confirmed(program, kind, wrong)
    facts = _facts(ran.reports)
    if ran.plans:
        facts["plans checked"] = ran.plans
    return Checked("failed" if failures else "held", tuple(failures), "", facts, ran.peaks)


# ---- the two kinds -----------------------------------------------------------------------------
@dataclasses.dataclass
class _Ran:
    """The values of a program, the reports of its graphs, and the promises that these break."""

    values: list[Values]
    reports: list[Report]
    failures: list[Failure]
    peaks: tuple[int, int, int] | None = None
    plans: int = 0


def _run_fast(program: Program) -> _Ran:
    setup, record = program.setup, list[Recording]()
    ran = _Ran(program.run(fast(setup, record)), [], [])
    for graph in record:
        if graph.report is None:  # it has no backward
            continue
        others = graph.of_first_batch  # other options are tried once for a graph
        tried = setup if others else dataclasses.replace(setup, variants=(), budgets=False)
        plans, wrong = check_graphs(graph, tried)
        ran.reports.append(graph.report)
        ran.failures += [*broken_promises(graph.report.outcome, setup), *wrong]
        ran.failures += broken_budgets(graph) if tried.budgets else ()
        ran.plans += plans
    return ran


def _run_inductor(program: Program) -> _Ran:
    before, measured = len(mstpass.reports()), list[int]()
    values = program.run(by_inductor(program.setup), peaks=measured)
    reports = mstpass.reports()[before:]
    broken = [b for report in reports for b in broken_promises(report.outcome, program.setup)]
    peaks = None
    if len(reports) == 1 and "output 1" not in values[0] and not program.setup.is_symbolic:
        outcome = reports[0].outcome
        if outcome.peak_bytes is not None and outcome.scheduled_peak_bytes is not None:
            peaks = (outcome.peak_bytes, outcome.scheduled_peak_bytes, measured[0])
            broken += broken_peak(outcome, measured[0], program.setup, lambda: _alone(program))
    return _Ran(values, reports, broken, peaks)


def _alone(program: Program) -> tuple[int, int]:
    """The scheduled and the measured peak of a program that Inductor compiles alone, in bytes.

    The schedule is not always read; then its peak counts as 0.
    """
    measured: list[int] = []
    reader = ReadSchedule()
    settings = {SCHEDULE_HOOK: reader, "fx_graph_cache": False}  # a cache has no schedule
    program.run(by_inductor(program.setup, ours=False, settings=settings), peaks=measured)
    return reader.peak_bytes or 0, measured[0]


def _compile(program: Program, kind: str, ours: bool) -> Compile:
    return fast(program.setup, [], ours) if kind == FAST else by_inductor(program.setup, ours)


def _references(program: Program, kind: str, seed: int) -> References:
    """The values of eager mode, and those in float64.

    Inductor draws other random numbers than eager mode does: what draws is compared with Inductor
    alone, after the same seed. Its C++ has no vectors then, since these have faults of their own
    (`mend_vectorized_cpp`).
    """
    with DrawInFloat32() as draws:
        eager, exact = program.run(seed=seed), program.run(seed=seed, exact=True)
    if draws.drew and kind == INDUCTOR:
        scalar = by_inductor(program.setup, ours=False, settings={"cpp.simdlen": 1})
        alone = program.run(scalar, seed)
        return References(eager, exact, alone)
    return References(eager, exact)


# ---- failures ----------------------------------------------------------------------------------
def _crashed(program: Program, kind: str, error: Exception) -> Checked:
    """A failure of ours, unless the program fails without us too."""
    text = _text(error)
    try:
        program.run(_compile(program, kind, ours=False))
    except Exception as other:
        return Checked("torch fails", reason=_text(other))
    return Checked("failed", (Failure("crash", text),))


def _confirmed(program: Program, kind: str, wrong: Mapping[str, str]) -> Iterator[Failure]:
    """The wrong values that are wrong after another seed too, and right without us."""
    seed = 1000
    references = _references(program, kind, seed)
    with forced_loops(program.setup):
        ours = program.run(_compile(program, kind, ours=True), seed)
    again = wrong_values(ours, references, program.setup)
    if not again.keys() & wrong.keys():
        return
    try:
        without = program.run(_compile(program, kind, ours=False), seed)
        torchs = wrong_values(without, references, program.setup)
    except Exception:
        torchs = {}
    for name, reason in wrong.items():
        if name in again and name not in torchs:
            yield Failure("wrong value", f"{name}: {reason}")


def _facts(reports: Sequence[Report]) -> dict[str, int]:
    facts: Counter[str] = Counter()
    for report in reports:
        facts["graphs"] += 1
        facts["ranges of lengths"] += bool(report.outcome.peaks)
        for region in report.regions:
            symbolic = " symbolic" if region.symbolic else ""
            facts[f"{region.kind} {region.mode}{symbolic}"] += 1
        facts["refused"] += len(report.rejections)
        save_plan = report.outcome.save_plan
        if save_plan is not None:
            facts["split by torch"] += save_plan.solver == "torch"
            facts["reconstructed"] += len(save_plan.reconstructed)
    return {name: number for name, number in facts.items() if number}


def _text(error: BaseException) -> str:
    """The innermost cause of an error, and the deepest function of ours that it came through."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/mstpass/" in f.filename and "/fuzz/" not in f.filename]
    place = ""
    if ours:
        file = ours[-1].filename.split("/mstpass/")[-1]
        place = f" at {file}:{ours[-1].name}"
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}{place}: {message[0][:300] if message else ''}"
