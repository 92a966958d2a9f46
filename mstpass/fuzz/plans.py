"""The third oracle: what a plan promises.

- A part that is left whole has a reason, and no stage failed.
- The simulated peak is not above that of Inductor alone, and neither is the measured one, up to 3 %
  and 4 KiB.
- What the report says of Inductor alone is what Inductor schedules, up to 5 % and 4 KiB.
- The free plan takes no more time than ``free_overhead`` allows.
- A lower budget never has a higher peak, and the least memory is at most that of Inductor alone.
- A budget in bytes that some plan meets is met, without a warning. One above what all known plans
  need takes no more time than the free plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

from mstpass import pipeline
from mstpass.fuzz.case import Case
from mstpass.fuzz.compiled import Recording
from mstpass.inductor_hooks import pipeline_kwargs
from mstpass.limit import MEASURED_OVER_SIMULATED, Limit
from mstpass.options import Options
from mstpass.partition.solve import missed_budgets
from mstpass.partition.solvers.candidate import TIE
from mstpass.plans import Outcome
from mstpass.torch_internals.fake_tensors import as_while_tracing

BUDGETS = ("free", 0.8, 0.5, 0.2, 0.0)
_CALLS_BYTES = 4096  # what calls such as convolutions may allocate inside
_BASELINE = 0.05  # of a scheduled peak: as far from it as a report may be
_ROUNDING = 1e-9  # of sums of times
GRAIN_BYTES = 64  # torch's CPU allocator: less makes no difference
_SAME_TIME = 0.02  # of a step: the free overhead
Budget = str | float | int
_PLANS_BY_PEAK = ("auto", "peak_search")


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is wrong: its kind, which stays while a case shrinks, and the details."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def broken_promises(outcome: Outcome, setup: Case) -> Iterator[Failure]:
    """A failure for each promise that the plan of one graph breaks."""
    for rejection in outcome.rejections:
        if rejection.stage == "error" or not rejection.reason.strip():
            yield Failure("refusal", f"{rejection.stage}: {rejection.node}: {rejection.reason!r}")
    if not _keeps_loops(outcome, setup):
        yield from broken_limits(outcome, Options.parse(setup.options, environ={}))


def broken_limits(
    outcome: Outcome, options: Options, limit: Limit | None = None
) -> Iterator[Failure]:
    """The same for the peak and the time of a plan whose loops nobody forces.

    Args:
        limit: what the plan may take; None: as the options ask.
    """
    peak, before = outcome.peak_bytes, outcome.baseline_peak_bytes
    if options.solver not in _PLANS_BY_PEAK or peak is None or before is None:
        return
    if peak > TIE * before + GRAIN_BYTES:
        yield Failure("higher peak", f"{peak} bytes, {before} under Inductor alone")
    extra_time = outcome.extra_time or 0.0
    is_free = (limit or Limit.of(options)).is_free and options.chunk_tokens is None
    if is_free and extra_time > options.free_overhead + _ROUNDING:
        text = f"{extra_time:.1%} more time; free_overhead allows {options.free_overhead:.1%}"
        yield Failure("slow free plan", text)


def broken_peak(
    outcome: Outcome, measured: int, setup: Case, alone: Callable[[], tuple[int, int]]
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
    before = outcome.baseline_peak_bytes
    if others_scheduled and before is not None:
        if abs(before - others_scheduled) > _BASELINE * others_scheduled + _CALLS_BYTES:
            text = f"{before} bytes said of Inductor alone, which schedules {others_scheduled}"
            yield Failure("wrong baseline", text)
    scheduled = outcome.scheduled_peak_bytes
    if scheduled is not None and not _is_above(scheduled, others_scheduled):
        return
    if _is_above(measured, others_measured):
        text = f"{measured} bytes measured, {others_measured} under Inductor alone"
        yield Failure("higher peak", text)


def _is_above(peak: int, other: int) -> bool:
    return peak > MEASURED_OVER_SIMULATED * other + _CALLS_BYTES


def _keeps_loops(outcome: Outcome, setup: Case) -> bool:
    """Whether loops stay even where they raise the peak."""
    forced = setup.forced and setup.options.get("chunk_tokens") is not None
    return bool(outcome.regions) and (forced or any(r.unbounded for r in outcome.regions))


def broken_budgets(recording: Recording) -> Iterator[Failure]:
    """The same for budgets that contradict each other, or the plans that are known in any case."""
    if recording.options.solver in _PLANS_BY_PEAK:
        may_choose = recording.options.may_choose
        yield from contradictions(functools.partial(_outcome, recording), may_choose)


def contradictions(
    plan: Callable[[Budget], Outcome | None], may_choose: bool = True
) -> Iterator[Failure]:
    """A failure for each pair of budgets of one graph whose plans contradict each other.

    Args:
        plan: the plan within a budget; None where budgets have no say.
        may_choose: whether the loops are mstpass's choice; under a budget, others stay, whatever
            time and memory they take.
    """
    outcomes = {budget: plan(budget) for budget in BUDGETS}
    known = {b: o for b, o in outcomes.items() if o is not None and o.peak_bytes is not None}
    if len(known) < len(BUDGETS):
        return
    peaks: dict[Budget, int] = {budget: o.peak_bytes or 0 for budget, o in known.items()}
    for more, less in itertools.pairwise([*peaks][not may_choose :]):
        if _is_higher(peaks[less], peaks[more]):
            text = f"budget {less}: {peaks[less]} bytes, budget {more}: {peaks[more]} bytes"
            yield Failure("not monotonic", text)
    least, free = peaks[0.0], peaks["free"]
    before = known["free"].baseline_peak_bytes or free
    if may_choose and _is_higher(least, before):
        yield Failure("least above a known plan", f"{least} bytes, {before} under Inductor alone")
    most = max(least, free)  # it may be lower by a tie
    budgets = [max(1, int(least + share * (most - least))) for share in (0.0, 0.3, 0.7, 1.0)]
    for budget in (*budgets, int(max(most, before) * MEASURED_OVER_SIMULATED) + GRAIN_BYTES):
        outcome = plan(budget)
        peak = None if outcome is None else outcome.peak_bytes
        if outcome is None or peak is None or peak > budget + GRAIN_BYTES:
            yield Failure("budget missed", f"{budget} bytes: {peak}, though 0.0 needs {least}")
        elif peak <= budget and missed_budgets(outcome.notes):
            yield Failure("budget met, and a warning", f"{budget} bytes: {peak}")
    outcome = plan(budget)  # the largest
    slowest = max(known["free"].extra_time or 0.0, 0.0)
    if may_choose and outcome is not None and (outcome.extra_time or 0.0) > slowest + _SAME_TIME:
        text = f"{outcome.extra_time} at {budget} bytes, {slowest} without a budget"
        yield Failure("more time with more memory", text)


def _is_higher(peak: int, other: int) -> bool:
    return peak > TIE * other + GRAIN_BYTES


def _outcome(recording: Recording, budget: Budget) -> Outcome | None:
    """The plan under another budget, with its simulated peak.

    None if torch splits the graph, and if the plan has loops of unbounded length: these are
    chosen for batches that may be longer than the one at hand.
    """
    assert recording.joint is not None, "the joint is known"
    options = dataclasses.replace(recording.options, memory_budget=budget, strict=False)
    kwargs = pipeline_kwargs(recording.given)
    with as_while_tracing(recording.joint.graph):
        outcome = pipeline.run(recording.joint, options, before_schedule=True, **kwargs).outcome
    by_torch = outcome.save_plan is not None and outcome.save_plan.solver == "torch"
    unbounded = any(region.unbounded for region in outcome.regions)
    return None if by_torch or unbounded else outcome
