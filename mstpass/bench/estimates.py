"""How far the estimated times of plans are from the measured ones.

mst's report estimates the time of a plan beyond that of the step without loops. That step is taken
to run as long as Inductor's, so the estimate stands beside the measured time relative to Inductor::

    deviation  =  estimated / measured - 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mstpass.bench import tables
from mstpass.bench.comparison import Row, ratios
from mstpass.bench.tables import Result, Table, Target

LIMIT = 0.15  # of a deviation, where there is a limit
COLUMN = "estimated"


def deviation(row: Row, base: Row) -> float | None:
    """Of one contender; None if it has no estimate or no time."""
    measured = ratios(row, base)
    if measured is None or row.estimated is None or row.error:
        return None
    return row.estimated / measured[0] - 1


def cell(row: Row, base: Row) -> str:
    """The estimate, and in brackets its deviation: ``1.08x (-3 %)``."""
    off = deviation(row, base)
    text = tables.times_cell(row.estimated)
    return text if off is None else f"{text} ({100 * off:+.0f} %)"


def judge(result: Result, what: str, rows: Iterable[Row], base: Row) -> None:
    """Add the largest deviation of these rows to the targets."""
    found = [off for row in rows if (off := deviation(row, base)) is not None]
    if found:
        largest = max(map(abs, found))
        result.targets.append(Target(f"{what}: |estimated / measured - 1|", largest, LIMIT))


def peaks_and_times(title: str, rows: Sequence[Row], base: Row) -> Table:
    """A table of peaks and times, each also relative to ``base``, which is Inductor."""
    lines = tuple(
        (
            row.name,
            tables.mib_cell(row.peak_bytes),
            tables.times_cell(tables.quotient(row.peak_bytes, base.peak_bytes)),
            tables.seconds_cell(row.median_s),
            row.error or tables.ratio_cell(ratios(row, base)),
            cell(row, base),
        )
        for row in rows
    )
    columns = ("", "peak MiB", "peak / Inductor", "time s", "time / Inductor", COLUMN)
    return Table(title, columns, lines)
