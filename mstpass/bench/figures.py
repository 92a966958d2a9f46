"""The figures of contenders: one row each, and the cells, tables and targets that rows make.

mst's report estimates the time of a plan beyond that of the step without loops. That step is taken
to run as long as Inductor's, so the estimate stands beside the measured time relative to Inductor::

    deviation  =  estimated / measured - 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mstpass
from mstpass.bench import results
from mstpass.bench.results import Ratio, Result, Table, Target, quotient
from mstpass.measure import Timing

DEVIATION_LIMIT = 0.15  # of an estimated time
PEAKS_AND_TIMES = ("", "peak MiB", "peak / Inductor", "time s", "time / Inductor", "estimated")
ROUNDS = "Time: median ratio to Inductor over interleaved rounds (least-greatest)."


@dataclass
class Row:
    """The figures of one contender.

    Attributes:
        value_error, gradient_error: largest relative errors against the first contender.
        simulated_bytes: the peak in mst's report; None for other backends.
        estimated: the time relative to the step without loops, by mst's report.
        plan: mst's loops, as text.
        axes: what each of them runs along, as text.
        error: why the contender has dropped out; empty if it has not.
    """

    name: str
    value: float | None = None
    value_error: float | None = None
    gradient_error: float | None = None
    first_call_s: float | None = None
    peak_bytes: int | None = None
    simulated_bytes: int | None = None
    estimated: float | None = None
    seconds: list[float] = field(default_factory=list)
    plan: str = ""
    axes: str = ""
    error: str = ""

    @property
    def median_s(self) -> float | None:
        return None if self.error or not self.seconds else Timing(tuple(self.seconds)).median_s


def write_plan(row: Row, reports: Sequence[mstpass.Report]) -> None:
    """Write what mst plans for a step to its row; the estimates, if it is one graph."""
    row.plan, row.axes = plan_text(reports), axes_text(reports)
    if len(reports) == 1:
        row.simulated_bytes, extra_time = reports[0].peak_bytes, reports[0].extra_time
        row.estimated = None if extra_time is None else 1 + extra_time


def plan_text(reports: Iterable[mstpass.Report]) -> str:
    """The loops of plans: what they compute, their mode, and the number of their chunks."""
    regions = (region for report in reports for region in report.regions)
    return ", ".join(f"{r.kind} {r.mode} in {r.num_chunks}" for r in regions)


def axes_text(reports: Iterable[mstpass.Report]) -> str:
    """The axis and the number of chunks of every loop: ``mixed: tokens in 4, features in 8``.

    Regions with the same loops are counted: ``3 x fused: tokens in 4``.
    """
    regions = (region for report in reports for region in report.regions)
    texts = Counter(
        f"{r.mode}: " + ", ".join(f"{loop.cut.axis} in {loop.cut.count}" for loop in r.loops)
        for r in regions
    )
    return "; ".join(text if count == 1 else f"{count} x {text}" for text, count in texts.items())


def ratios(row: Row | None, base: Row) -> Ratio | None:
    """Median, least and greatest ratio of two contenders' times, taken round by round."""
    if row is None or row.median_s is None or base.median_s is None:
        return None
    if len(row.seconds) != len(base.seconds):
        return None
    each = [a / b for a, b in zip(row.seconds, base.seconds, strict=True)]
    return Timing(tuple(each)).median_s, min(each), max(each)


def time_ratio(row: Row | None, base: Row) -> float | None:
    """The median ratio of two contenders' times."""
    found = ratios(row, base)
    return found and found[0]


def peak_ratio(row: Row | None, base: Row) -> float | None:
    return quotient(row.peak_bytes, base.peak_bytes) if row is not None else None


def deviation(row: Row, base: Row) -> float | None:
    """Of the estimated time; None if a row has no estimate or no time."""
    measured_ratio = time_ratio(row, base)
    if measured_ratio is None or row.estimated is None or row.error:
        return None
    return row.estimated / measured_ratio - 1


def estimate_cell(row: Row, base: Row) -> str:
    """The estimated time, and in brackets its deviation: ``1.08x (-3 %)``."""
    off = deviation(row, base)
    text = results.times_cell(row.estimated)
    return text if off is None else f"{text} ({100 * off:+.0f} %)"


CELLS: Mapping[str, Callable[[Row, Row], str]] = {  # by column; of a row and of Inductor's
    "": lambda row, base: row.name,
    "peak MiB": lambda row, base: results.mib_cell(row.peak_bytes),
    "peak / Inductor": lambda row, base: results.times_cell(peak_ratio(row, base)),
    "time s": lambda row, base: results.seconds_cell(row.median_s),
    "time / Inductor": lambda row, base: row.error or results.ratio_cell(ratios(row, base)),
    "estimated": estimate_cell,
    "chunks": lambda row, base: row.plan,
}


def steps_table(
    title: str,
    rows: Iterable[Row],
    base: Row,
    columns: Sequence[str] = PEAKS_AND_TIMES,
    own: Mapping[str, Callable[[Row], str]] | None = None,
) -> Table:
    """A table of contenders; ``base`` is Inductor's row.

    Args:
        columns: those of `CELLS`, and those of ``own``, in their order.
        own: cells of columns that only this table has.
    """
    own = own or {}

    def cell(name: str, row: Row) -> str:
        return own[name](row) if name in own else CELLS[name](row, base)

    lines = (tuple(cell(name, row) for name in columns) for row in rows)
    return Table(title, tuple(columns), tuple(lines))


def peak_and_time_targets(
    what: str, row: Row, base: Row, peak_limit: float, time_limit: float
) -> list[Target]:
    """Limits of a row's peak and time relative to another's; ``what`` has ``{}`` for the figure."""
    return [
        Target(what.format("peak"), peak_ratio(row, base), peak_limit),
        Target(what.format("time"), time_ratio(row, base), time_limit),
    ]


def judge_estimates(result: Result, what: str, rows: Iterable[Row], base: Row) -> None:
    """Add the largest deviation of these rows' estimated times to the targets."""
    found = [abs(off) for row in rows if (off := deviation(row, base)) is not None]
    if found:
        target = Target(f"{what}: |estimated / measured - 1|", max(found), DEVIATION_LIMIT)
        result.targets.append(target)


def records(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    return [vars(row) for row in rows.values()]
