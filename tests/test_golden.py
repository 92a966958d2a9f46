"""The graph before and after, as text to read. MSTPASS_UPDATE_GOLDEN=1 rewrites the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mstpass import pipeline
from mstpass.graph.graph_text import graph_text
from mstpass.options import Options
from tests.checks import joint_graph

GOLDEN = Path(__file__).parent / "golden"


def lm_head(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(h @ w.t(), y)


def swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def _inputs(name: str) -> list[torch.Tensor]:
    leaf = lambda *shape: torch.randn(*shape, requires_grad=True)
    if name == "lm_head":
        return [leaf(96, 16), leaf(512, 16), torch.randint(0, 512, (96,))]
    return [leaf(96, 16), leaf(64, 16), leaf(64, 16), leaf(16, 64)]


CASES = {
    "lm_head": (lm_head, {}),
    "swiglu_save": (swiglu, {}),
    "swiglu_mixed": (swiglu, {"memory_budget": 0.0}),
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="texts are of torch 2.13")
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    fn, given = CASES[name]
    graph, outputs = joint_graph(fn, *_inputs(name))
    before = graph_text(graph)
    options = Options.parse({"chunk_tokens": 40, **given}, environ={})  # 96 = 2 * 40 + 16: ragged
    result = pipeline.run(graph, options, num_fwd_outputs=outputs, stop_after="apply")
    assert result.joint is not None
    assert graph_text(graph) == before, "planning and applying must leave the old graph alone"
    text = f"before:\n{before}\nafter:\n{graph_text(result.joint)}"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("MSTPASS_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
