"""The third oracle: what a plan promises.

- A part that is left whole has a reason, and no stage failed.
- The simulated peak is not above that of the step without loops.
- A lower budget never has a higher peak; a budget in bytes that some plan meets is met.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from mstpass import pipeline
from mstpass.fuzz.compiled import Recording
from mstpass.fuzz.program import Setup
from mstpass.inductor_hooks import pipeline_kwargs
from mstpass.partition.solvers.candidate import TIE
from mstpass.plans import Outcome
from mstpass.torch_internals.fake_tensors import as_while_tracing

BUDGETS = ("free", 0.8, 0.5, 0.2, 0.0)
GRAIN_BYTES = 64  # torch's CPU allocator: less makes no difference
_PLANS_BY_PEAK = ("auto", "peak_search")


def broken_promises(outcome: Outcome, setup: Setup) -> Iterator[tuple[str, str]]:
    """Kind and description of each promise that the plan of one graph breaks."""
    for rejection in outcome.rejections:
        if rejection.stage == "error" or not rejection.reason.strip():
            yield "refusal", f"{rejection.stage}: {rejection.node}: {rejection.reason!r}"
    if setup.options.get("solver", "auto") not in _PLANS_BY_PEAK or outcome.peak_bytes is None:
        return
    if not _keeps_loops(outcome, setup) and outcome.baseline_peak_bytes is not None:
        if outcome.peak_bytes > TIE * outcome.baseline_peak_bytes + GRAIN_BYTES:
            peak, before = outcome.peak_bytes, outcome.baseline_peak_bytes
            yield "higher peak", f"{peak} bytes, {before} without loops"


def _keeps_loops(outcome: Outcome, setup: Setup) -> bool:
    """Whether loops stay even where they raise the peak."""
    forced = setup.forced and setup.options.get("chunk_tokens") is not None
    return bool(outcome.regions) and (forced or any(r.symbolic for r in outcome.regions))


def broken_budgets(recording: Recording) -> Iterator[tuple[str, str]]:
    """The same for budgets that are met though they are lower, or missed though they can be met."""
    if recording.options.solver not in _PLANS_BY_PEAK:
        return
    peaks = {budget: _peak_bytes(recording, budget) for budget in BUDGETS}
    if None in peaks.values():
        return
    known: dict[Any, int] = {budget: peak or 0 for budget, peak in peaks.items()}
    for more, less in itertools.pairwise(BUDGETS):
        if known[less] > TIE * known[more] + GRAIN_BYTES:
            text = f"budget {less}: {known[less]} bytes, budget {more}: {known[more]} bytes"
            yield "not monotonic", text
    least, most = known[0.0], known["free"]
    for share in (0.0, 0.3, 0.7):
        budget = max(1, int(least + share * (most - least)))
        peak = _peak_bytes(recording, budget)
        if peak is None or peak > budget + GRAIN_BYTES:
            yield "budget missed", f"{budget} bytes: {peak}, though 0.0 needs {least}"


def _peak_bytes(recording: Recording, budget: str | float | int) -> int | None:
    """The simulated peak of the plan under another budget; None if torch splits the graph."""
    assert recording.joint is not None
    options = dataclasses.replace(recording.options, memory_budget=budget, strict=False)
    kwargs = pipeline_kwargs(recording.given)
    with as_while_tracing(recording.joint.graph):
        outcome = pipeline.run(recording.joint, options, **kwargs).outcome
    by_torch = outcome.save_plan is not None and outcome.save_plan.solver == "torch"
    return None if by_torch else outcome.peak_bytes
