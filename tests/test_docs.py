"""The documentation: links and files that it names exist, and its Python runs where it can."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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


def test_links_exist() -> None:
    made = {DOCS / "gallery.md", DOCS / "report-example.md"}  # while the site is built
    missing = {}
    for path in PAGES:
        targets = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        files = [path.parent / target for target in targets]
        missing[_name(path)] = [f for f in files if not f.exists() and f.resolve() not in made]
    assert not {page: files for page, files in missing.items() if files}


def test_files_that_are_named_exist() -> None:
    """``mstpass/a/b.py``, ``tests/test_a.py``, and ``a/b.py`` in the picture."""
    pages = [*PAGES, DOCS / "img" / "pipeline.dot"]
    missing = {_name(path): _missing(path) for path in pages}
    assert not {page: names for page, names in missing.items() if names}


def _missing(path: Path) -> set[str]:
    """The files that a page names and that do not exist."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"\b((?:mstpass|tests|viz|examples)/[\w/]+(?:\.py|/(?=`)))", text)
    if path.suffix == ".dot":
        inside = r"(?<![\w/])(?!dot)[a-z_]+/[\w/]*(?:\.py)?|(?<![\w/])\w+\.py"
        shown = re.findall(r'<font face="Courier"[^>]*>(.*?)</font>', text)
        named = [f"mstpass/{name}" for line in shown for name in re.findall(inside, line)]
        assert len(named) > 20
    alone = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text))
    return {name for name in named if not (ROOT / name).exists()} | (alone - _FILES - USERS)


def test_names_of_the_api_pages_exist() -> None:
    pages = sorted((DOCS / "api").glob("*.md"))
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    names = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    assert len(names) > 30
    for name in names:
        resolve_name(name)


_RESOLVE = """
import json, sys

import mstpass

known = {f"mstpass.{name}" for name in dir(mstpass)}  # nothing else of mstpass is imported yet
wrong = {}
for page, names in json.load(sys.stdin).items():
    for name in names:
        try:
            if ".".join(name.split(".")[:2]) not in known:
                raise AttributeError("it is not there at first")
            eval(name)
        except AttributeError as error:
            wrong.setdefault(page, []).append(f"{name}: {error}")
print(json.dumps(wrong))
"""


def test_names_are_there_after_import_mstpass_alone() -> None:
    """In a process that has imported nothing else; pages of the API say which module has a name."""
    pages = {_name(path): _dotted_names(path) for path in PAGES if path.parent.name != "api"}
    assert "mstpass.measure.peak_bytes" in pages["README.md"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _RESOLVE],
        input=json.dumps({page: names for page, names in pages.items() if names}),
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert json.loads(found.stdout) == {}


def _dotted_names(path: Path) -> list[str]:
    """Names such as ``mstpass.measure.timed``, but not those of ``-m``, ``from`` and of logs."""
    text = path.read_text(encoding="utf-8")
    return sorted(
        set(re.findall(r"(?<!-m )(?<!from )(?<![\w./+])mstpass(?:\.[A-Za-z]\w*)+(?!\.?\w)", text))
    )


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
