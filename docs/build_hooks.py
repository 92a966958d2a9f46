"""What MkDocs does beyond rendering docs/: pages of files outside of it, and a report to try.

- CHANGELOG.md, CONTRIBUTING.md, viz/README.md with its pictures, and each example become pages.
- A link to such a file, which is right where the sources are read, is led to its page.
- The table of private APIs on ``pytorch-internals.md`` comes from mstpass/torch_internals.
- ``assets/report.html`` is the HTML report of a small model, planned on fake tensors.
- A page that would load anything from the network is an error: the site works offline.
"""

from __future__ import annotations

import ast
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from mstpass.bench.models import LlamaSize, llama
from mstpass.explainer.plan_step import explain_parts
from mstpass.torch_internals.probes import PROBES

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "viz/README.md": "gallery.md",
    "README.md": "index.md",
    "examples": "examples/index.md",
    **{
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in (ROOT / "examples").glob("*.py")
    },
    **{
        f"viz/gallery/{path.name}": f"gallery/{path.name}"
        for path in (ROOT / "viz" / "gallery").iterdir()
    },
}
_SOURCES = {page: source for source, page in PAGES.items() if source != "README.md"}
REPORT = "assets/report.html"
_PRIVATE_APIS = re.compile(r"<!-- private-apis:.*?-->")
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
_HARMLESS = re.compile(r"rel=[\"']?(?:canonical|prev|next)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of files outside docs/."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for source, uri in PAGES.items():
        path = ROOT / source
        if source == "README.md" or path.is_dir():
            continue
        if path.suffix == ".py":
            add(uri, _example(path))
        elif path.suffix == ".md":
            add(uri, path.read_text(encoding="utf-8"))
        else:
            add(uri, path.read_bytes())
    add("examples/index.md", _examples())
    add("report-example.md", _REPORT_PAGE)
    add(REPORT, _report())
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files outside docs/ to their pages, and links of those files into docs/."""
    uri = page.file.src_uri
    markdown = _PRIVATE_APIS.sub(lambda _: _private_apis(), markdown)
    at = _SOURCES.get(uri, f"docs/{uri}")

    def led(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(at), target))
        found = PAGES.get(path) or (path[len("docs/") :] if path.startswith("docs/") else None)
        if found is None:
            return match[0]
        link = posixpath.relpath(found, posixpath.dirname(uri) or ".")
        return f"{opening}{link}{anchor or ''}{closing}"

    return _LINK.sub(led, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse what a browser would load from the network."""
    for match in _LOADED.finditer(output):
        if not _HARMLESS.search(match[0]):
            raise PluginError(f"{page.file.src_uri} loads from the network: {match[0]}")
    return output


# ---- pages -------------------------------------------------------------------------------------
def _example(path: Path) -> str:
    """An example as a page: its docstring as text, and the whole file."""
    source = path.read_text(encoding="utf-8")
    title, _, rest = (ast.get_docstring(ast.parse(source)) or path.stem).partition("\n")
    text = re.sub(r"``(.+?)``", r"`\1`", rest.strip())
    return f"# {path.name}\n\n{title}\n\n{text}\n\n```python\n{source}```\n"


def _examples() -> str:
    lines = ["# Examples", "", "Each example has a `main()` and runs as a test.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"- [{path.name}]({path.stem}.md): {docstring.partition(chr(10))[0]}")
    return "\n".join(lines) + "\n"


def _private_apis() -> str:
    rows = [
        "| probe | file | what for | private APIs | lost without them |",
        "|---|---|---|---|---|",
    ]
    for probe in PROBES:
        apis = "<br>".join(f"`{api}`".replace("|", "\\|") for api in probe.apis)
        file = f"`{probe.adapter}.py`"
        rows.append(f"| {probe.name} | {file} | {probe.purpose} | {apis} | {probe.lost} |")
    return "\n".join(rows)


_REPORT_PAGE = f"""---
hide: [toc]
---

# A report to try

The [HTML report](html-report.md) of a Llama-like model with four layers (d=256, MLP width 1024,
vocabulary 32000, 2048 tokens), planned while this site was built. [Open it alone]({REPORT}).

<iframe class="report-frame" src="{REPORT}" title="HTML report of a Llama-like model"></iframe>
"""


def _report() -> str:
    """The HTML report of the benchmarks' model, from fake tensors: nothing is run."""
    model, ids_BS, target_BS = llama(LlamaSize(), torch.device("meta"))
    (report,) = explain_parts(model, (ids_BS, target_BS), pareto=True, fullgraph=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        report.to_html(path, "A Llama-like step: 4 layers, 2048 tokens, vocabulary 32000")
        return path.read_text(encoding="utf-8")
