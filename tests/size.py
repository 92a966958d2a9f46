"""How large the package is: its files, and their code lines, by folder. ``make size`` prints them.

A code line holds more than a comment or a docstring. The most that there may be is in
``pyproject.toml`` (``tool.mstpass.size``), and only goes down: a step that makes the code smaller
lowers it, and one that has to raise it says in the changelog what for.
"""

from __future__ import annotations

import io
import tokenize
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mstpass"
LAB = frozenset({"bench", "fuzz", "planner", "linter", "report", "cli", "demo"})
_NO_CODE = frozenset(
    getattr(tokenize, name)
    for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
)


def code_lines(source: str) -> int:
    """The lines of a file that hold code. A string in triple quotes counts as a docstring."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and token.string.lstrip("rRbBuU").startswith('"""')
        if token.type not in _NO_CODE and not is_text:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def sizes() -> dict[Path, int]:
    """The code lines of each file of the package."""
    return {path: code_lines(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def is_core(path: Path) -> bool:
    """Whether a file of the package is for users' steps: it is in no folder of the lab."""
    return LAB.isdisjoint(path.relative_to(PACKAGE).parts[:-1])


def main() -> None:
    """Print the code lines and the files of each folder."""
    table = Table("folder", "code lines", "files")
    lines, files = Counter[str](), Counter[str]()
    every = sizes()
    for path, count in every.items():
        folder, core = path.relative_to(PACKAGE).parts[0], "core" if is_core(path) else "lab"
        for name in (folder if path.parent != PACKAGE else "(files)", core, "package"):
            lines[name] += count
            files[name] += 1
    totals = ("core", "lab", "package")
    for name in (*sorted(lines.keys() - set(totals), key=lambda n: -lines[n]), *totals):
        table.add_row(name, f"{lines[name]:,}", str(files[name]), end_section=name == totals[0])
    Console().print(table)


if __name__ == "__main__":
    main()
