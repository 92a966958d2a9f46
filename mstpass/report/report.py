"""``Report``: one compiled graph's plan as attributes, text, JSON, HTML and pictures."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

from mstpass.errors import UserError
from mstpass.plain_data import decoded, printable, read_json
from mstpass.plans import Outcome
from mstpass.report.compare import Comparison, compare
from mstpass.report.data import ReportData
from mstpass.report.details import Details
from mstpass.report.drawing.dot import render, to_dot
from mstpass.report.html import page
from mstpass.report.memory_viz import PICKLE_PROTOCOL, memory_snapshot
from mstpass.report.perfetto import perfetto_trace
from mstpass.report.report_json import compact_json, details_from_json
from mstpass.report.text import report_lines


class ReportFileError(ValueError):
    """A file does not hold a report; the message names the file and says what is wrong."""


class NoDetails(UserError):
    """A report that cannot be drawn: it has the plan, but not the nodes of the graph."""


class Report(ReportData):
    """What mstpass decided for one graph: its data, text, JSON, HTML and pictures."""

    def with_outcome(self, **changes: Any) -> Report:
        """A copy of the report with some fields of its outcome changed."""
        return Report(dataclasses.replace(self.outcome, **changes), self.cached, self.details)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report to ``path``, one field a line; ``Report.from_json`` reads it."""
        Path(path).write_text(self.json_text(), encoding="utf-8")

    def json_text(self) -> str:
        """The text that `to_json` writes."""
        rows = (
            f"{json.dumps(key)}: {compact_json(value)}" for key, value in self.to_dict().items()
        )
        return "{\n" + ",\n".join(rows) + "\n}\n"

    def to_html(
        self,
        path: str | os.PathLike[str],
        title: str = "mstpass report",
        measured: Comparison | None = None,
    ) -> None:
        """Write the report to ``path`` as one page that a browser opens from disk, offline.

        The page shows the joint graph and the memory over time if the report has ``details``.

        Args:
            measured: from `compare`, which the page then shows too.
        """
        text = "\n\n".join(str(part) for part in (self, measured) if part is not None)
        with open(path, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(page(self, text, title, measured))

    def compare(self, snapshot: Any, largest: int = 10) -> Comparison:
        """Lay a measured step over the plan; ``print`` the result, or give it to `to_html`.

        Args:
            snapshot: of one step, compiled before. On CUDA ``torch.cuda.memory._snapshot()``, after
                ``torch.cuda.memory._record_memory_history()``, or the path of its pickle; on the
                CPU a ``torch.profiler.profile`` with ``profile_memory=True``.
            largest: how many blocks are listed.

        Raises:
            NoDetails: the report has no ``details``.
            SnapshotError: the snapshot holds no allocations.
            ValueError: the plan has no memory over time, because a size depends on data.
        """
        return compare(self._known_details(), snapshot, largest)

    @staticmethod
    def from_json(path: str | os.PathLike[str], cached: bool = False) -> Report:
        """Read a report that `to_json` wrote, also by an older or a newer version of mstpass.

        Raises:
            ReportFileError: the file holds something else.
            OSError: the file cannot be read.
        """
        try:
            data = read_json(path)
            outcome = decoded(Outcome, data, newer=True)
            if "regions" not in data:
                raise ValueError("it has no regions")
            details = details_from_json(data["details"]) if data.get("details") else None
        except (TypeError, ValueError, LookupError) as error:
            raise ReportFileError(f"{path}: not a report of mstpass: {error}") from None
        return Report(outcome, cached, details)

    # ---- pictures ------------------------------------------------------------------------------
    def to_dot(self, fold: str = "auto") -> str:
        """The plan as Graphviz's DOT text: forward, backward, and the values that are saved.

        Args:
            fold: ``"none"`` draws every node; ``"module"`` draws the nodes of a module as one box;
                ``"auto"`` does so for large graphs, and draws equal layers once.

        Raises:
            MissingPackageError: without the ``graphviz`` package.
            NoDetails: the report has no ``details``.
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
        """Write memory over time, as planned and under Inductor alone, for https://ui.perfetto.dev.

        Raises:
            NoDetails: the report has no ``details``.
        """
        trace = perfetto_trace(self.outcome, self._known_details())
        Path(path).write_text(compact_json(trace), encoding="utf-8")

    def to_memory_viz(self, path: str | os.PathLike[str]) -> None:
        """Write memory over time for https://pytorch.org/memory_viz: a pickle of plain data.

        Device 0 is the step as planned, device 1 that of Inductor alone.

        Raises:
            NoDetails: the report has no ``details``.
        """
        snapshot = memory_snapshot(self._known_details())
        Path(path).write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))

    def _render(self, kind: str, path: str | os.PathLike[str], fold: str) -> None:
        Path(path).write_bytes(render(self.to_dot(fold), kind))

    def _known_details(self) -> Details:
        if self.details is None:
            raise NoDetails(
                "this report cannot be drawn, because it has the plan but not the graph: an error "
                "made mstpass leave the graph to Inductor, or an older version wrote the report. "
                "Compile or explain the step again"
            )
        return self.details

    def __str__(self) -> str:
        return printable("\n".join(report_lines(self)))

    def __repr__(self) -> str:
        return (
            f"<mstpass.Report: {len(self.regions)} regions, {len(self.rejections)} rejections, "
            f"{self.saved_text} saved for backward>"
        )
