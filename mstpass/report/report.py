"""``Report``: one compiled graph's plan, as attributes, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

from mstpass.extras import UserError
from mstpass.plans import (
    ChunkPlan,
    LoopInput,
    LoopOutput,
    LoopPlan,
    Outcome,
    Reconstructed,
    Rejection,
    SavedValue,
    SavePlan,
)
from mstpass.report.columns import from_columns, to_columns
from mstpass.report.details import Details
from mstpass.report.html import page
from mstpass.report.units import bytes_text

SCHEMA = "mstpass-report/1"


class NoDetails(UserError):
    """A report that cannot be drawn: it knows what was decided, but not of which graph."""


class Report:
    """What mstpass decided for one graph.

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

    def with_outcome(self, **changes: Any) -> Report:
        """The same with other fields of its outcome."""
        return Report(dataclasses.replace(self.outcome, **changes), self.cached, self.details)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; docs/explain.md has every field."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self.outcome),
            "details": to_columns(self.details) if self.details is not None else None,
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report to ``path``, a line for each field; ``Report.from_json`` reads it."""
        Path(path).write_text(self.json_text(), encoding="utf-8")

    def json_text(self) -> str:
        """What `to_json` writes."""
        rows = (f"{json.dumps(key)}: {_dumped(value)}" for key, value in self.to_dict().items())
        return "{\n" + ",\n".join(rows) + "\n}\n"

    def to_html(self, path: str | os.PathLike[str], title: str = "mstpass report") -> None:
        """Write the report to ``path`` as one page that a browser opens from disk, offline.

        The joint graph and the memory over time are on it where the report has ``details``.
        """
        with open(path, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(page(self, title))

    @staticmethod
    def from_json(path: str | os.PathLike[str], cached: bool = False) -> Report:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        details = data.get("details")
        return Report(_outcome(data), cached, from_columns(details) if details else None)

    # ---- pictures ------------------------------------------------------------------------------
    def to_dot(self, fold: str = "auto") -> str:
        """The plan as Graphviz's DOT text: forward, backward, and what crosses between them.

        Args:
            fold: ``"none"``: every node; ``"module"``: the nodes of a module as one; ``"auto"``: so
                for large graphs, and equal layers drawn once.

        Raises:
            MissingPackageError: without the ``graphviz`` package.
            NoDetails: the report is without ``details``.
            ValueError: an unknown ``fold``.
        """
        from mstpass.report.dot import to_dot

        return to_dot(self, self._known_details(), fold)

    def to_svg(self, path: str | os.PathLike[str], fold: str = "auto") -> None:
        """Write `to_dot` as SVG; needs Graphviz's ``dot`` program (else `MissingPackageError`)."""
        self._render("svg", path, fold)

    def to_png(self, path: str | os.PathLike[str], fold: str = "auto") -> None:
        """Write `to_dot` as PNG; needs Graphviz's ``dot`` program (else `MissingPackageError`)."""
        self._render("png", path, fold)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write memory over time, with and without the plan, for https://ui.perfetto.dev.

        Raises:
            NoDetails: the report is without ``details``.
        """
        from mstpass.report.timelines import perfetto_trace

        trace = perfetto_trace(self.outcome, self._known_details())
        Path(path).write_text(_dumped(trace), encoding="utf-8")

    def to_memory_viz(self, path: str | os.PathLike[str]) -> None:
        """Write memory over time for https://pytorch.org/memory_viz: a pickle of plain data.

        Device 0 is the step as planned, device 1 the step without loops.

        Raises:
            NoDetails: the report is without ``details``.
        """
        from mstpass.report.timelines import PICKLE_PROTOCOL, memory_snapshot

        snapshot = memory_snapshot(self._known_details())
        Path(path).write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))

    def _render(self, kind: str, path: str | os.PathLike[str], fold: str) -> None:
        from mstpass.report.dot import render

        Path(path).write_bytes(render(self.to_dot(fold), kind))

    def _known_details(self) -> Details:
        if self.details is None:
            raise NoDetails(
                "this report has no details to draw: an error left the graph to Inductor, or the "
                "report was written by an older version; compile or explain the step again"
            )
        return self.details

    def __str__(self) -> str:
        from mstpass.report.text import lines

        return "\n".join(lines(self))

    def __repr__(self) -> str:
        return (
            f"<mstpass.Report: {len(self.regions)} regions, {len(self.rejections)} rejections, "
            f"{bytes_text(self.saved_bytes)} saved for backward>"
        )


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=sorted)


def _outcome(data: dict[str, Any]) -> Outcome:
    plan = data["save_plan"]
    return Outcome(
        regions=tuple(_chunk_plan(item) for item in data["regions"]),
        rejections=tuple(Rejection(**item) for item in data["rejections"]),
        save_plan=_save_plan(plan) if plan else None,
        peak_bytes=data["peak_bytes"],
        baseline_peak_bytes=data["baseline_peak_bytes"],
        extra_time=data["extra_time"],
        notes=tuple(data["notes"]),
        scheduled_peak_bytes=data.get("scheduled_peak_bytes"),
        limit_bytes=data.get("limit_bytes"),
    )


def _save_plan(data: dict[str, Any]) -> SavePlan:
    return SavePlan(
        tuple(SavedValue(**value) for value in data["saved"]),
        data["solver"],
        tuple(
            Reconstructed(
                **{**item, "sources": tuple(item["sources"]), "bounds": tuple(item["bounds"])}
            )
            for item in data["reconstructed"]
        ),
        tuple(data.get("nested", ())),
    )


def _chunk_plan(data: dict[str, Any]) -> ChunkPlan:
    loops = tuple(
        LoopPlan(
            phase=loop["phase"],
            members=tuple(loop["members"]),
            inputs=tuple(LoopInput(i["node"], tuple(i["spec"])) for i in loop["inputs"]),
            outputs=tuple(
                LoopOutput(o["node"], _spec(o["spec"]), o["scaled"]) for o in loop["outputs"]
            ),
            unit=loop["unit"],
            prelude=tuple(loop["prelude"]),
        )
        for loop in data["loops"]
    )
    members = tuple((name, _spec(spec)) for name, spec in data["members"])
    return ChunkPlan(**{**data, "loops": loops, "members": members, "saved": tuple(data["saved"])})


def _spec(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
