"""A second process hits the compile caches, and still has the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mstpass.inductor_hooks import uuid
from mstpass.options import Options
from tests.forks import run_ranks_of

pytestmark = pytest.mark.sampled(3)

FULL = pytest.mark.full


def _run(folder: Path, name: str, dynamic: bool, mlp: bool) -> dict[str, object]:
    """What the program found, with the cache of this run of the tests: no other has its graphs."""
    out = folder / f"{name}.json"
    (done,) = run_ranks_of(["tests.cached_step", str(out), str(dynamic), str(mlp)], ranks=1)
    assert not done.returncode, done.stderr[-4000:]
    result: dict[str, object] = json.loads(out.read_text())
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "mlp"),
    [(True, False), *(pytest.param(dynamic, True, marks=FULL) for dynamic in (False, True))],
)
def test_second_process_hits_the_caches(tmp_path: Path, dynamic: bool, mlp: bool) -> None:
    cold, warm = (_run(tmp_path, name, dynamic, mlp) for name in ("cold", "warm"))
    plans = 1 + dynamic  # one for each range of lengths
    assert cold["autograd"].get("autograd_cache_miss") == plans  # type: ignore[attr-defined]
    assert warm["autograd"].get("autograd_cache_hit") == plans  # type: ignore[attr-defined]
    assert warm["inductor"].get("fxgraph_cache_hit", 0) >= 1  # type: ignore[attr-defined]
    assert not warm["inductor"].get("fxgraph_cache_miss", 0)  # type: ignore[attr-defined]
    assert not cold["cached"] and warm["cached"]
    assert cold["regions"] and cold["regions"] == warm["regions"]
    assert all(region[-1] == dynamic for region in cold["regions"])  # type: ignore[attr-defined]
    assert cold["text"] == warm["text"]
    assert cold["details"] and cold["details"] == warm["details"]
    assert (cold["gradient"], cold["norm"]) == (warm["gradient"], warm["norm"])


def test_a_plan_is_that_of_so_many_threads() -> None:
    """With more threads attention needs more memory: a plan made for fewer may exceed a budget."""
    before, threads = uuid(Options()), torch.get_num_threads()
    assert uuid(Options()) == before
    torch.set_num_threads(threads + 1)
    try:
        assert uuid(Options()) != before
    finally:
        torch.set_num_threads(threads)
