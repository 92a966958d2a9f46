"""``ReportData``: what a report knows of one compiled graph. ``Report`` adds files and pictures.

The copies of a plan beside the computation: what runs when, by the cost model's estimates.

Which rejections ask the user for a change, and which do not.

A rejection asks for nothing if its advice is to change nothing; if the part is too small to matter
for the peak of the step; or if it is small, and only its number of tokens is too small, while other
parts of the same step run in chunks. Pages and texts sum these up; the data have them whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.graph.advice import MORE_ROWS, asks_for_nothing
from mstpass.plans import (
    ChunkPlan,
    Outcome,
    Reconstructed,
    Rejection,
    SavedValue,
    SavePlan,
    Transfer,
)
from mstpass.report.details import BACKWARD, FORWARD, Details, details_to_json


@dataclasses.dataclass(frozen=True)
class PhaseTimes:
    """The forward, which copies to the host, or the backward, which copies back.

    Attributes:
        copies: in the order in which they run; their times count from the phase's beginning.
        compute_us: the time of the phase's ops.
    """

    phase: str
    copies: tuple[Transfer, ...]
    compute_us: float

    @property
    def copy_us(self) -> float:
        return sum(copy.end_us - copy.start_us for copy in self.copies)

    @property
    def wait_us(self) -> float:
        """How long the device waits for copies; it computes beside the rest of them."""
        return sum(copy.stall_us for copy in self.copies)

    @property
    def end_us(self) -> float:
        return self.compute_us + self.wait_us


def phase_times(plan: SavePlan) -> tuple[PhaseTimes, ...]:
    """The phases of a plan with copies, forward first; nothing for a plan without copies."""
    if not plan.transfers:
        return ()
    to_host = tuple(copy for copy in plan.transfers if copy.to_host)
    back = tuple(copy for copy in plan.transfers if not copy.to_host)
    return (
        PhaseTimes(FORWARD, to_host, plan.forward_us),
        PhaseTimes(BACKWARD, back, plan.backward_us),
    )


# ---- data ----------------------------------------------------------------------------------------
SCHEMA = "mstpass-report/1"


class ReportData:
    """What mstpass decided for one graph, as data.

    Attributes:
        outcome: the plans themselves.
        cached: the graph came from a compile cache, and the report from a file beside it.
        details: the graph's nodes and its memory over time, from which pictures are drawn. None
            if an error made mstpass leave the graph to Inductor.
    """

    def __init__(self, outcome: Outcome, cached: bool = False, details: Details | None = None):
        self.outcome, self.cached, self.details = outcome, cached, details

    @property
    def regions(self) -> tuple[ChunkPlan, ...]:
        """The parts of the graph that run in chunks."""
        return self.outcome.regions

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The large parts that do not run in chunks, each with the reason and what to change."""
        return self.outcome.rejections

    @property
    def saved(self) -> tuple[SavedValue, ...]:
        """The values that forward keeps for backward."""
        return self.outcome.save_plan.saved if self.outcome.save_plan else ()

    @property
    def saved_bytes(self) -> int:
        """Bytes that wait on the device between forward and backward."""
        return self.outcome.save_plan.saved_bytes if self.outcome.save_plan else 0

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in host memory between forward and backward."""
        return self.outcome.save_plan.host_bytes if self.outcome.save_plan else 0

    @property
    def saved_text(self) -> str:
        """The saved bytes in words: ``42.2 MiB``, or ``42.2 MiB + 14.0 MiB on the host``."""
        on_host = f" + {bytes_text(self.host_bytes)} on the host" if self.host_bytes else ""
        return bytes_text(self.saved_bytes) + on_host

    @property
    def offloaded(self) -> frozenset[str]:
        """The nodes whose values wait in host memory."""
        plan = self.outcome.save_plan
        return frozenset(copy.node for copy in plan.transfers) if plan else frozenset()

    @property
    def reconstructed(self) -> tuple[Reconstructed, ...]:
        """Values that backward computes from other values instead of reading a saved copy."""
        return self.outcome.save_plan.reconstructed if self.outcome.save_plan else ()

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of forward and backward: from Inductor's schedule after compilation, else
        simulated.

        None if a size depends on data, or if an error made mstpass leave the graph to Inductor.
        """
        if self.outcome.scheduled_peak_bytes is not None:
            return self.outcome.scheduled_peak_bytes
        return self.outcome.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int | None:
        """Simulated peak of the step under Inductor alone, which saves what torch's
        partitioner chooses; None if no peak is simulated."""
        return self.outcome.baseline_peak_bytes

    @property
    def extra_time(self) -> float | None:
        """Time beyond what Inductor alone takes, as a fraction of it, by the cost model."""
        return self.outcome.extra_time

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; docs/report-json.md lists every field."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self.outcome),
            "details": details_to_json(self.details) if self.details is not None else None,
        }


# ---- unasked changes -----------------------------------------------------------------------------
LEAST_PEAK_SHARE = 0.01  # what is below this share of the peak is not worth a line of its own
_SMALL = 0.05  # of the peak


def asks_for_change(rejection: Rejection, report: ReportData) -> bool:
    """Whether the user can do something about this rejection of the report that may help."""
    if asks_for_nothing(rejection.fix):
        return False
    is_few = report.regions and MORE_ROWS in rejection.fix
    least = _SMALL if is_few else LEAST_PEAK_SHARE
    return not 0 < rejection.bytes <= least * (report.outcome.peak_bytes or 0)
