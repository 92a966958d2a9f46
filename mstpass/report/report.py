"""``Report``: one compiled graph's plan as attributes, text, JSON, HTML and pictures.

A report as one HTML page that works offline, from disk: data, style and scripts in one file.

The page's data are the report's JSON. Its style and its scripts are the files of
``mstpass/report/viewer``, unchanged. Every string reaches the page through JSON and
``textContent``, so none is read as HTML.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import os
import pickle
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from mstpass.errors import UserError
from mstpass.plain_data import decoded, printable, read_json
from mstpass.plans import Outcome
from mstpass.report.compare import Comparison, compare
from mstpass.report.data import ReportData, asks_for_change
from mstpass.report.details import Details, compact_json, details_from_json
from mstpass.report.dot import render, to_dot
from mstpass.report.memory_traces import PICKLE_PROTOCOL, memory_snapshot, perfetto_trace
from mstpass.report.text import report_lines

# In the order in which the page reads them: a script uses names of the scripts before it.
SCRIPTS = (
    "dom.js",
    "data.js",
    "tree.js",
    "bands.js",
    "inspector.js",
    "rows.js",
    "graph.js",
    "search.js",
    "axes.js",
    "memory.js",
    "pareto.js",
    "tables.js",
    "copies.js",
    "measured.js",
    "main.js",
)


def page(report: ReportData, text: str, title: str, measured: Comparison | None = None) -> str:
    """The whole page. For a report without details it has only the summary and the tables.

    Args:
        text: the report as text, for a browser without JavaScript.
        measured: a section of the page, if it is known.
    """
    viewer = files("mstpass.report") / "viewer"
    style = (viewer / "style.css").read_text(encoding="utf-8")
    sources = [(viewer / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(sources) + "})();\n"
    data = {
        "title": title,
        "cached": report.cached,
        "report": report.to_dict(),
        "measured": measured.to_dict() if measured is not None else None,
        "asked": [asks_for_change(rejection, report) for rejection in report.rejections],
    }
    return Template((viewer / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        title=html.escape(title),
        style=style,
        script=script,
        data=_script_json(data),
        text=html.escape(text),
    )


def _script_json(data: dict[str, Any]) -> str:
    """JSON that can stand inside a ``script`` element: it contains no ``<``, ``>`` or ``&``."""
    text = compact_json(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(source: str) -> str:
    """The hash of a ``script`` or ``style`` element. The page's policy allows only these to run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


# ---- the report ----------------------------------------------------------------------------------
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
