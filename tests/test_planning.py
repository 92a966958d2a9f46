"""Planning takes time in proportion to the graph, not to its square."""

from __future__ import annotations

import sys
from typing import Any

import torch

from mstpass import backend, pipeline
from mstpass.bench.models import LlamaSize, llama
from mstpass.options import Options
from tests.checks import joint_graph

FEW, MANY = 3, 12
LINEAR = 1.15  # times the layers' ratio: sorting, and sets of bits


def _calls(layers: int) -> int:
    """Calls of functions while a step is planned: unlike its time the same on every machine."""
    size = LlamaSize(128, layers, 4, mlp_width=352, vocabulary=8000, length=1024)
    model, ids_BS, target_BS = llama(size, torch.device("cpu"))
    module, outputs = joint_graph(model, ids_BS, target_BS)
    backend.prepare(module)
    options = Options.parse({}, environ={})
    pipeline.run(module, options, num_fwd_outputs=outputs, stop_after="plan")  # fills torch's caches
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        result = pipeline.run(module, options, num_fwd_outputs=outputs, stop_after="plan")
    finally:
        sys.setprofile(before)
    assert result.problem is not None and len(result.problem.regions) == layers + 1
    return count


def test_planning_is_linear_in_the_depth() -> None:
    assert _calls(MANY) <= LINEAR * MANY / FEW * _calls(FEW)
