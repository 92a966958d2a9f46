"""``Report``: one compiled graph's plan, as attributes, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

from mstpass.errors import UserError
from mstpass.report.data import ReportData
from mstpass.report.details import Details
from mstpass.report.details_json import from_columns
from mstpass.report.dot import render, to_dot
from mstpass.report.html import page
from mstpass.report.memory_timelines import PICKLE_PROTOCOL, memory_snapshot, perfetto_trace
from mstpass.report.outcome_json import outcome_from
from mstpass.report.text import lines
from mstpass.report.units import bytes_text


class NoDetails(UserError):
    """A report that cannot be drawn: it knows what was decided, but not of which graph."""


class Report(ReportData):
    """What mstpass decided for one graph: its data, text, JSON, HTML and pictures."""

    def with_outcome(self, **changes: Any) -> Report:
        """The same with other fields of its outcome."""
        return Report(dataclasses.replace(self.outcome, **changes), self.cached, self.details)

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
            file.write(page(self, str(self), title))

    @staticmethod
    def from_json(path: str | os.PathLike[str], cached: bool = False) -> Report:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        details = data.get("details")
        return Report(outcome_from(data), cached, from_columns(details) if details else None)

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
        trace = perfetto_trace(self.outcome, self._known_details())
        Path(path).write_text(_dumped(trace), encoding="utf-8")

    def to_memory_viz(self, path: str | os.PathLike[str]) -> None:
        """Write memory over time for https://pytorch.org/memory_viz: a pickle of plain data.

        Device 0 is the step as planned, device 1 the step without loops.

        Raises:
            NoDetails: the report is without ``details``.
        """
        snapshot = memory_snapshot(self._known_details())
        Path(path).write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))

    def _render(self, kind: str, path: str | os.PathLike[str], fold: str) -> None:
        Path(path).write_bytes(render(self.to_dot(fold), kind))

    def _known_details(self) -> Details:
        if self.details is None:
            raise NoDetails(
                "this report has no details to draw: an error left the graph to Inductor, or the "
                "report was written by an older version; compile or explain the step again"
            )
        return self.details

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def __repr__(self) -> str:
        return (
            f"<mstpass.Report: {len(self.regions)} regions, {len(self.rejections)} rejections, "
            f"{bytes_text(self.saved_bytes)} saved for backward>"
        )


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=sorted)
