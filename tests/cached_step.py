"""Compiles a step, and writes down what its report and torch's caches say: run by test_cache.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.report.details import details_to_json
from mstpass.torch_internals.caches import counters


def main(out: str, *words: str) -> None:
    os.environ.pop("MSTPASS_CHUNK", None)
    torch.manual_seed(0)
    dynamic, mlp = (word == "True" for word in words)
    gate, up, down = nn.Linear(32, 128), nn.Linear(32, 128), nn.Linear(128, 32)
    head = nn.Linear(32, 600)
    lengths = (4096, 20_000) if dynamic else (512,)
    x, y = torch.randn(1, lengths[-1], 32), torch.randint(0, 600, (lengths[-1],))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(x + down(F.silu(gate(x)) * up(x)) if mlp else x)
        return F.cross_entropy(head(h).flatten(0, 1), y)

    options = {"strict": True, "memory_budget": 0.0}
    step = torch.compile(loss, backend="mst", dynamic=dynamic, options=options)
    for length in lengths:
        step(x[:, :length].clone(), y[:length].clone()).backward()
    report = mstpass.reports()[-1]
    assert head.weight.grad is not None and head.bias.grad is not None
    found = {
        "autograd": dict(counters["aot_autograd"]),
        "inductor": dict(counters["inductor"]),
        "cached": report.cached,
        "text": str(report).split("\n")[1:],
        "details": details_to_json(report.details),
        "regions": [(r.kind, r.mode, r.num_chunks, r.symbolic) for r in report.regions],
        "gradient": head.weight.grad.double().sum().item(),
        "norm": head.bias.grad.norm().item(),
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
