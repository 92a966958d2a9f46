"""A report as one HTML page that works offline, from disk: data, style and scripts in one file.

The page's data are the report's JSON; its scripts and its style are the files of
``mstpass/report/viewer``, put in as they are. Every string reaches the page through JSON and
``textContent``: none is read as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from string import Template
from typing import Any

from mstpass.report.data import ReportData

# In the order in which they are read: a script uses names of those before it.
SCRIPTS = (
    "dom.js",
    "data.js",
    "tree.js",
    "bands.js",
    "inspector.js",
    "rows.js",
    "graph.js",
    "search.js",
    "memory.js",
    "pareto.js",
    "tables.js",
    "main.js",
)


def page(report: ReportData, text: str, title: str) -> str:
    """The whole page. Of a report without details it has the summary and the tables only."""
    viewer = files("mstpass.report") / "viewer"
    style = (viewer / "style.css").read_text(encoding="utf-8")
    sources = [(viewer / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(sources) + "})();\n"
    data = {"title": title, "cached": report.cached, "report": report.to_dict()}
    return Template((viewer / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        title=html.escape(title),
        style=style,
        script=script,
        data=_json(data),
        text=html.escape(text),
    )


def _json(data: dict[str, Any]) -> str:
    """JSON that may stand inside a ``script`` element: no character of it ends or opens one."""
    text = json.dumps(data, separators=(",", ":"), default=sorted)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(source: str) -> str:
    """Of a ``script`` or ``style`` element, for the content policy: nothing else runs or loads."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
