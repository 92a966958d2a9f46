"""The third oracle: what a plan promises.

- A part that is left whole has a reason, and no stage failed.
- The simulated peak is not above that of Inductor alone, and neither is the measured one, up to 3 %
  and 4 KiB.
- A lower budget never has a higher peak; a budget in bytes that some plan meets is met.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from mstpass import pipeline
from mstpass.fuzz.compiled import Recording
from mstpass.fuzz.program import Setup
from mstpass.inductor_hooks import pipeline_kwargs
from mstpass.limit import MEASURED_OVER_SIMULATED
from mstpass.partition.solvers.candidate import TIE
from mstpass.plans import Outcome
from mstpass.torch_internals.fake_tensors import as_while_tracing

BUDGETS = ("free", 0.8, 0.5, 0.2, 0.0)
_CALLS_BYTES = 4096  # what calls such as convolutions may allocate inside
GRAIN_BYTES = 64  # torch's CPU allocator: less makes no difference
_PLANS_BY_PEAK = ("auto", "peak_search")


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is wrong: its kind, which stays while a case shrinks, and the details."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def broken_promises(outcome: Outcome, setup: Setup) -> Iterator[Failure]:
    """A failure for each promise that the plan of one graph breaks."""
    for rejection in outcome.rejections:
        if rejection.stage == "error" or not rejection.reason.strip():
            yield Failure("refusal", f"{rejection.stage}: {rejection.node}: {rejection.reason!r}")
    if setup.options.get("solver", "auto") not in _PLANS_BY_PEAK or outcome.peak_bytes is None:
        return
    if not _keeps_loops(outcome, setup) and outcome.baseline_peak_bytes is not None:
        if outcome.peak_bytes > TIE * outcome.baseline_peak_bytes + GRAIN_BYTES:
            peak, before = outcome.peak_bytes, outcome.baseline_peak_bytes
            yield Failure("higher peak", f"{peak} bytes, {before} under Inductor alone")


def broken_peak(
    outcome: Outcome, measured: int, setup: Setup, alone: Callable[[], tuple[int, int]]
) -> Iterator[Failure]:
    """The same for a measured peak in bytes.

    A schedule does not say what calls allocate inside, such as products of 16 bits, which hold
    their operands in blocks. Steps as small as these may consist of little else; so the scheduled
    peak has to be higher as well.

    Args:
        alone: the scheduled and the measured peak under Inductor alone, which takes another
            compilation.
    """
    promised = setup.options.get("solver", "auto") in _PLANS_BY_PEAK
    if not promised or outcome.peak_bytes is None or _keeps_loops(outcome, setup):
        return
    others_scheduled, others_measured = alone()
    scheduled = outcome.scheduled_peak_bytes
    if scheduled is not None and not _is_above(scheduled, others_scheduled):
        return
    if _is_above(measured, others_measured):
        text = f"{measured} bytes measured, {others_measured} under Inductor alone"
        yield Failure("higher peak", text)


def _is_above(peak: int, other: int) -> bool:
    return peak > MEASURED_OVER_SIMULATED * other + _CALLS_BYTES


def _keeps_loops(outcome: Outcome, setup: Setup) -> bool:
    """Whether loops stay even where they raise the peak."""
    forced = setup.forced and setup.options.get("chunk_tokens") is not None
    return bool(outcome.regions) and (forced or any(r.unbounded for r in outcome.regions))


def broken_budgets(recording: Recording) -> Iterator[Failure]:
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
            yield Failure("not monotonic", text)
    least = known[0.0]
    most = max(least, known["free"])  # it may be lower by a tie
    for share in (0.0, 0.3, 0.7):
        budget = max(1, int(least + share * (most - least)))
        peak = _peak_bytes(recording, budget)
        if peak is None or peak > budget + GRAIN_BYTES:
            yield Failure("budget missed", f"{budget} bytes: {peak}, though 0.0 needs {least}")


def _peak_bytes(recording: Recording, budget: str | float | int) -> int | None:
    """The simulated peak of the plan under another budget.

    None if torch splits the graph, and if the plan has loops of unbounded length: these are
    chosen for batches that may be longer than the one at hand.
    """
    assert recording.joint is not None, "the joint is known"
    options = dataclasses.replace(recording.options, memory_budget=budget, strict=False)
    kwargs = pipeline_kwargs(recording.given)
    with as_while_tracing(recording.joint.graph):
        outcome = pipeline.run(recording.joint, options, **kwargs).outcome
    by_torch = outcome.save_plan is not None and outcome.save_plan.solver == "torch"
    unbounded = any(region.unbounded for region in outcome.regions)
    return None if by_torch or unbounded else outcome.peak_bytes
