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
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mstpass.fuzz.case import Case
from mstpass.fuzz.compiled import Recording, by_inductor, fast, forced_loops
from mstpass.fuzz.plans import broken_promises
from mstpass.fuzz.program import Compile, DrawInFloat32, Inputs, Program, Setup, Values
from mstpass.fuzz.values import wrong_values

FAST, INDUCTOR = "fast", "inductor"


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is wrong: its kind, which stays while a case shrinks, and the details."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """What became of one case.

    Attributes:
        status: "held", "failed", "invalid" (eager cannot run it) or "torch fails" (without us).
        facts: what the plans did, for the summary: how many regions of each mode, and so on.
    """

    status: str
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    facts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def check_case(case: Case, kind: str = FAST) -> Checked:
    """Run a case, and say what is wrong with it."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checked = check_program(Program.of(case), kind)
    gc.collect(1)
    return dataclasses.replace(checked, seconds=round(time.perf_counter() - start, 2))


def check_program(program: Program, kind: str = FAST) -> Checked:
    try:
        exact, eager = _references(program, seed=0)
    except Exception as error:
        return Checked("invalid", reason=_text(error))
    record: list[Recording] = []
    try:
        with forced_loops(program.setup):
            ours = program.run(_compile(program, kind, record))
            promises = [p for graph in record for p in broken_promises(graph, program.setup)]
    except Exception as error:
        return _crashed(program, kind, error)
    failures = [Failure(*promise) for promise in promises]
    wrong = wrong_values(ours, eager, exact, program.setup)
    if wrong:
        failures += _confirmed(program, kind, wrong)
    return Checked("failed" if failures else "held", tuple(failures), facts=_facts(record))


def hold(model: Callable[[], nn.Module], inputs: Inputs, kind: str = FAST, **setup: Any) -> None:
    """Check a program, as a test.

    Args:
        setup: the attributes of ``Setup`` that are not plain.

    Raises:
        AssertionError: a value is wrong, a promise is broken, or mstpass fails.
    """
    checked = check_program(Program(model, inputs, Setup(**setup)), kind)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))


def _compile(program: Program, kind: str, record: list[Recording], ours: bool = True) -> Compile:
    setup = program.setup
    return fast(setup, record, ours) if kind == FAST else by_inductor(setup, ours)


def _references(program: Program, seed: int) -> tuple[list[Values], list[Values]]:
    """The values in float64, and those of eager mode."""
    with DrawInFloat32():
        return program.run(seed=seed, exact=True), program.run(seed=seed)


def _crashed(program: Program, kind: str, error: Exception) -> Checked:
    """A failure of ours, unless the program fails without us too."""
    text = _text(error)
    try:
        program.run(_compile(program, kind, [], ours=False))
    except Exception as other:
        return Checked("torch fails", reason=_text(other))
    return Checked("failed", (Failure("crash", text),))


def _confirmed(program: Program, kind: str, wrong: Mapping[str, str]) -> list[Failure]:
    """The wrong values that are wrong after another seed too, and right without us."""
    seed = 1000
    exact, eager = _references(program, seed)
    with forced_loops(program.setup):
        ours = program.run(_compile(program, kind, []), seed)
    again = wrong_values(ours, eager, exact, program.setup)
    both = [name for name in wrong if name in again]
    if not both:
        return []
    try:
        without = program.run(_compile(program, kind, [], ours=False), seed)
    except Exception:
        without = ours
    torchs = wrong_values(without, eager, exact, program.setup) if without is not ours else {}
    return [Failure("wrong value", f"{name}: {wrong[name]}") for name in both if name not in torchs]


def _facts(record: list[Recording]) -> dict[str, int]:
    facts: Counter[str] = Counter()
    for graph in record:
        facts["graphs"] += 1
        assert graph.report is not None
        outcome = graph.report.outcome
        for region in outcome.regions:
            facts[f"{region.kind} {region.mode}{' symbolic' if region.symbolic else ''}"] += 1
        facts["refused"] += len(outcome.rejections)
        if outcome.save_plan is not None:
            facts["split by torch"] += outcome.save_plan.solver == "torch"
            facts["reconstructed"] += len(outcome.save_plan.reconstructed)
    return {name: number for name, number in facts.items() if number}


def _text(error: BaseException) -> str:
    """The innermost cause of an error, and the deepest line of ours that it came through."""
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
