"""A report as one HTML page that works offline, from disk: data, style and scripts in one file.

The page's data are the report's JSON. Its style and its scripts are the files of
``mstpass/report/viewer``, unchanged. Every string reaches the page through JSON and
``textContent``, so none is read as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from string import Template
from typing import Any

from mstpass.report.compare import Comparison
from mstpass.report.data import ReportData
from mstpass.report.report_json import compact_json
from mstpass.report.unasked_changes import asks_for_change

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
