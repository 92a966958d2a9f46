"""The documentation: links and files that it names exist, and its Python runs where it can."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from mstpass.problem.solver_registry import registered

pytestmark = pytest.mark.op_by_op

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
RUNS = ("quickstart.md", "solvers.md")
# a user's own, and those of Accelerate that a patch is for
USERS = {"train.py", "dataclasses.py", "config_utils.py"}
_FILES = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_exist(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    made = {DOCS / "gallery.md", DOCS / "report-example.md"}  # while the site is built
    missing = [t for t in targets if not (path.parent / t).exists()]
    assert not [t for t in missing if (path.parent / t).resolve() not in made]


@pytest.mark.parametrize("path", [*PAGES, DOCS / "img" / "pipeline.dot"], ids=_name)
def test_files_that_are_named_exist(path: Path) -> None:
    """``mstpass/a/b.py``, ``tests/test_a.py``, and ``a/b.py`` in the picture."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"\b((?:mstpass|tests|viz|examples)/[\w/]+(?:\.py|/(?=`)))", text)
    if path.suffix == ".dot":
        inside = r"(?<![\w/])(?!dot)[a-z_]+/[\w/]*(?:\.py)?|(?<![\w/])\w+\.py"
        shown = re.findall(r'<font face="Courier"[^>]*>(.*?)</font>', text)
        named = [f"mstpass/{name}" for line in shown for name in re.findall(inside, line)]
        assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]
    alone = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text))
    assert not alone - _FILES - USERS


def test_names_of_the_api_pages_exist() -> None:
    pages = sorted((DOCS / "api").glob("*.md"))
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    names = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    assert len(names) > 30
    for name in names:
        resolve_name(name)


@pytest.mark.parametrize("page", RUNS)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(registered)
    torch.compiler.reset()
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace = {"__name__": "docs"}
    sources = ["\n" * text.count("\n", 0, m.start(1)) + m.group(1) for m in BLOCK.finditer(text)]
    assert len(sources) >= 2
    try:
        for source in sources:
            exec(compile(source, str(DOCS / page), "exec"), namespace)
    finally:
        registered.clear()
        registered.update(before)
        torch.compiler.reset()
