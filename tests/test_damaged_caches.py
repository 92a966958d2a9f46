"""Compile caches that are truncated, hold garbage or are of another time: the step is right.

A warm compilation in a process of its own is ``test_cache.py``'s; here a process forgets what it
compiled, and its files are damaged.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass import inductor_hooks
from mstpass.backend import mst
from mstpass.partition.solvers import SOLVERS
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.solver_registry import registered
from mstpass.torch_internals.caches import counters
from tests import test_cache

pytestmark = pytest.mark.slow
full = pytest.mark.full
LABELS_N = torch.arange(256) % 1024


def loss(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ head.t(), LABELS_N)


class Run:
    """One compilation, as of a new process, and a right step.

    Attributes:
        warned: what mstpass warned of.
        hits: how many graphs came from a compile cache.
        report: of the step.
    """

    def __init__(self, **options: Any):
        torch.compiler.reset()
        counters.clear()
        given = {"chunk_tokens": 64, **options}
        step = torch.compile(loss, backend=mst, options=given)
        torch.manual_seed(0)
        leaves = [(torch.randn(*size) / 4).requires_grad_() for size in ((256, 16), (1024, 16))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = torch.autograd.grad(step(*leaves), leaves)
        expected = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        self.warned = [text for w in caught if "mstpass" in (text := str(w.message))]
        of_steps, of_graphs = counters["aot_autograd"], counters["inductor"]
        self.hits = of_steps["autograd_cache_hit"] + of_graphs["fxgraph_cache_hit"]
        self.report = mstpass.reports()[-1]
        assert len(self.report.regions) == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compile cache that has the step."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert not Run().hits
    warm = Run()
    assert warm.hits and not warm.warned and warm.report.cached
    return folder


def _files(cache: Path) -> list[Path]:
    """Torch's entries: pickles of graphs that it has compiled."""
    entries = [p for name in ("fxgraph", "aotautograd") for p in (cache / name).rglob("*")]
    return [path for path in entries if path.is_file()]


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [_truncated, pytest.param(_garbage, marks=full), pytest.param(_empty, marks=full), Path.unlink],
)
def test_damaged_entries(cache: Path, damage: Callable[[Path], None]) -> None:
    files = _files(cache)
    assert len(files) >= 2
    for path in files:
        damage(path)
    run = Run()
    assert not run.hits and not run.report.cached
    assert Run().hits, "what was compiled anew is in the cache"


@full
def test_kernels_that_are_gone(cache: Path) -> None:
    for folder in cache.iterdir():
        if folder.name not in ("fxgraph", "aotautograd", "mstpass"):
            shutil.rmtree(folder)
    Run()


def _no_report(text: str) -> str:
    return json.dumps({**json.loads(text), "limit_bytes": "all"})


@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: text[: len(text) // 2],
        pytest.param(lambda _: "", marks=full),
        pytest.param(lambda _: "[" * 10**5, marks=full),
        pytest.param(_no_report, marks=full),
    ],
)
def test_a_damaged_report_beside_the_cache(cache: Path, damaged: Callable[[str], str]) -> None:
    """It has the limit by which the graph was planned, so the graph is compiled anew."""
    (path,) = (cache / "mstpass").glob("*.json")
    path.write_text(damaged(path.read_text()))
    run = Run()
    assert not run.hits and not run.report.cached
    (told,) = run.warned
    assert "compiles a cached graph anew" in told and str(path) in told
    run = Run()
    assert not run.warned and run.report.cached


def test_entries_of_other_sources_and_options(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(inductor_hooks, "_sources_hash", lambda: "another version")
        assert not Run().hits
    assert not Run(accumulate="input").hits
    assert Run().hits


def test_what_has_no_key_is_not_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function may change while its name stays: a solver, a pass of the scheduler."""
    asked: list[str] = []

    def solve(problem: CutProblem, budget_bytes: int | None) -> Plan:
        asked.append("solver")
        return SOLVERS["peak_search"](problem, budget_bytes)

    def users_pass(nodes: list[Any]) -> list[Any]:
        asked.append("pass")
        return nodes

    monkeypatch.setitem(registered, "mine", solve)
    hooks = ("_pre_fusion_custom_pass", "_post_fusion_custom_pass")
    for options in ({"solver": "mine"}, *({"inductor": {hook: users_pass}} for hook in hooks)):
        for _ in range(2):
            asked.clear()
            run = Run(**options)
            assert asked and not run.hits and not run.warned


@full
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    """They compile the same step into one empty cache at once; a third one finds it there."""
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(test_cache._run, tmp_path, f"run-{i}", False, False) for i in range(2)
        ]
        first, second = (future.result() for future in futures)
    third = test_cache._run(tmp_path, "run-2", False, False)
    assert third["autograd"].get("autograd_cache_hit") == 1  # type: ignore[attr-defined]
    for name in ("regions", "gradient", "norm", "text"):
        assert first[name] == second[name] == third[name]
