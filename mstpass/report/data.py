"""``ReportData``: what a report knows of one compiled graph. ``Report`` adds files and pictures."""

from __future__ import annotations

import dataclasses
from typing import Any

from mstpass.byte_sizes import bytes_text
from mstpass.plans import ChunkPlan, Outcome, Reconstructed, Rejection, SavedValue
from mstpass.report.details import Details
from mstpass.report.report_json import details_to_json

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
