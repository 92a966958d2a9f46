"""A second process hits the compile caches, and still has the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mstpass.inductor_hooks import uuid
from mstpass.options import Options

pytestmark = pytest.mark.sampled(3)

FULL = pytest.mark.full
PROGRAM = """
import json, sys, torch
import torch.nn.functional as F
from torch import nn
from mstpass.torch_internals.caches import counters
import mstpass

torch.manual_seed(0)
dynamic, mlp = (word == "True" for word in sys.argv[2:])
gate, up, down = nn.Linear(32, 128), nn.Linear(32, 128), nn.Linear(128, 32)
head = nn.Linear(32, 600)
lengths = (4096, 20_000) if dynamic else (512,)
x, y = torch.randn(1, lengths[-1], 32), torch.randint(0, 600, (lengths[-1],))

def loss(x, y):
    h = torch.tanh(x + down(F.silu(gate(x)) * up(x)) if mlp else x)
    return F.cross_entropy(head(h).flatten(0, 1), y)

options = {"strict": True, "memory_budget": 0.0}
step = torch.compile(loss, backend="mst", dynamic=dynamic, options=options)
for length in lengths:
    step(x[:, :length].clone(), y[:length].clone()).backward()
report = mstpass.reports()[-1]
from mstpass.report.details import details_to_json
json.dump({
    "autograd": dict(counters["aot_autograd"]), "inductor": dict(counters["inductor"]),
    "cached": report.cached, "text": str(report).split("\\n")[1:],
    "details": details_to_json(report.details),
    "regions": [(r.kind, r.mode, r.num_chunks, r.symbolic) for r in report.regions],
    "gradient": head.weight.grad.double().sum().item(), "norm": head.bias.grad.norm().item(),
}, open(sys.argv[1], "w"))
"""


def _run(folder: Path, name: str, dynamic: bool, mlp: bool) -> dict[str, object]:
    """What the program found, with the cache of this run of the tests: no other has its graphs."""
    out = folder / f"{name}.json"
    environ = dict(os.environ)
    environ.pop("MSTPASS_CHUNK", None)
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out), str(dynamic), str(mlp)],
        env=environ,
        check=True,
        timeout=300,
    )
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
