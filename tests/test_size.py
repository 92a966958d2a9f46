"""A wall against growth: the package is no larger, and no slower, than pyproject.toml says."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from mstpass.bench.problems import load
from mstpass.partition.solvers import SOLVERS
from tests.size import ROOT, code_lines, is_core, sizes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WALL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mstpass"]["size"]
_PROBLEMS = ("head", "llama-16", "llama-16-autocast", "mlps-2")
_NOISE = 2.0  # of CPU times on a machine that does other work


def test_the_package_is_no_larger() -> None:
    """A step that makes it smaller lowers the number; how to read it: tests/size.py."""
    every = sizes()
    found = {
        "core_lines": sum(lines for path, lines in every.items() if is_core(path)),
        "package_lines": sum(every.values()),
        "files": len(every),
    }
    larger = {name: (n, WALL[name]) for name, n in found.items() if n > WALL[name]}
    assert not larger, "more than pyproject.toml allows; `make size` shows where"


def test_planning_is_no_slower() -> None:
    """Coarsely, in units of other work of the interpreter, so that a slow machine does not fail."""

    def additions() -> None:
        counts = dict.fromkeys(range(1000), 0)
        for i in range(1_000_000):
            counts[i % 1000] += 1

    def plans() -> None:
        for problem in problems:
            SOLVERS["peak_search"](problem, 0)

    problems = [load(name) for name in _PROBLEMS]
    units = _cpu_seconds(plans) / min(_cpu_seconds(additions) for _ in range(3))
    assert units <= _NOISE * WALL["planning_units"]


def _cpu_seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("# a comment\n\nx = 1  # another\n", 1),
        ('"""A docstring\n\nof two lines."""\nx = (\n    1,\n)\n', 3),
        ("def f():\n    '''text'''\n", 2),
    ],
)
def test_code_lines(source: str, lines: int) -> None:
    assert code_lines(source) == lines
