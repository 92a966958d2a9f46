"""``ReportData``: what a report knows of one compiled graph, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from mstpass.plans import ChunkPlan, Outcome, Reconstructed, Rejection, SavedValue
from mstpass.report.details import Details
from mstpass.report.details_json import to_columns

SCHEMA = "mstpass-report/1"


class ReportData:
    """What mstpass decided for one graph, as data; ``Report`` adds files and pictures.

    Attributes:
        outcome: the plans themselves.
        cached: whether the graph came from a compile cache and the report from beside it.
        details: the graph's nodes and its memory over time, which pictures are drawn from; None
            where an error left the graph to Inductor.
    """

    def __init__(self, outcome: Outcome, cached: bool = False, details: Details | None = None):
        self.outcome, self.cached, self.details = outcome, cached, details

    @property
    def regions(self) -> tuple[ChunkPlan, ...]:
        return self.outcome.regions

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        return self.outcome.rejections

    @property
    def saved(self) -> tuple[SavedValue, ...]:
        return self.outcome.save_plan.saved if self.outcome.save_plan else ()

    @property
    def saved_bytes(self) -> int:
        return sum(value.bytes for value in self.saved)

    @property
    def reconstructed(self) -> tuple[Reconstructed, ...]:
        """Values that do not cross, or in fewer bytes, since backward has them by other means."""
        return self.outcome.save_plan.reconstructed if self.outcome.save_plan else ()

    @property
    def peak_bytes(self) -> int | None:
        """Peak of forward and backward, by Inductor's schedule; before compilation simulated.

        None where a size depends on data, and where an error left the graph to Inductor.
        """
        if self.outcome.scheduled_peak_bytes is not None:
            return self.outcome.scheduled_peak_bytes
        return self.outcome.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int | None:
        """Simulated peak of the step without loops; None where no peak is simulated."""
        return self.outcome.baseline_peak_bytes

    @property
    def extra_time(self) -> float | None:
        """Time beyond the step without loops, a fraction of it, by the cost model."""
        return self.outcome.extra_time

    def to_dict(self) -> dict[str, Any]:
        """Plain data; docs/explain.md has every field."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self.outcome),
            "details": to_columns(self.details) if self.details is not None else None,
        }
