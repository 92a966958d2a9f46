"""Recomputations wait for the gradients before them; finished loops free their buffers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_fw_bw_and_get_code

from mstpass import inductor_hooks, pipeline
from mstpass.bench.models import LlamaSize, Step, llama
from mstpass.graph.buffer_ops import done
from mstpass.loops.lowering import lower_loops
from mstpass.measure import peak_bytes
from mstpass.options import Options
from mstpass.report.store import reports
from mstpass.schedule.delay_recomputation import delay_recomputation, recomputation_waits
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from tests.checks import compiled, joint_graph
from tests.models import MLPS, Block

aten = torch.ops.aten


def _backward(layers: int, **options: Any) -> fx.Graph:
    model = nn.Sequential(*(Block(16, MLPS["gelu"](16)) for _ in range(layers)))
    x = torch.randn(2, 32, 16, requires_grad=True)
    joint, outputs = joint_graph(lambda x: model(x).sin().sum(), x)
    result = pipeline.run(joint, Options(chunk="off", **options), num_fwd_outputs=outputs)
    assert result.modules is not None
    return result.modules[1].graph


def test_each_recomputed_block_waits_for_the_gradients_before_it() -> None:
    graph = _backward(3, memory_budget=0.0)
    order = {node: i for i, node in enumerate(graph.nodes)}
    waits = recomputation_waits(graph)
    assert len(waits) >= 2
    for node, before in waits.items():
        assert all(order[other] < order[node] for other in before)
    places = sorted(order[node] for node in waits)
    backward_matmuls = [order[n] for n in graph.nodes if n.target is aten.mm.default]
    assert any(places[0] < m < places[1] for m in backward_matmuls)


def test_nothing_waits_if_no_matmul_is_recomputed() -> None:
    assert recomputation_waits(_backward(3)) == {}


def test_what_a_loop_reads_waits_for_the_loop_before_it() -> None:
    """A norm before attention's loop is not recomputed beside the MLP's loop, which ends later."""
    model, ids, labels = llama(LlamaSize(32, 2, 4, 160, 200, 1024), torch.device("cpu"))
    joint, outputs = joint_graph(model, ids, labels)
    result = pipeline.run(joint, Options(memory_budget=0.0), num_fwd_outputs=outputs)
    assert result.modules is not None
    graph = result.modules[1].graph
    assert lower_loops(graph) >= 5
    waits = recomputation_waits(graph)
    norms = [others for node, others in waits.items() if node.target is aten.mean.dim]
    assert len(norms) == 2, "one in each layer"
    assert all(any(node.target is done for node in others) for others in norms)


@pytest.mark.parametrize("tangent_rows", [1, 8])
def test_nothing_waits_for_a_value_that_needs_no_buffer(tangent_rows: int) -> None:
    """A node that others wait for is written to memory: here a scaled gradient of all rows."""
    graph = fx.Graph()
    tangent, x = graph.placeholder("tangents_1"), graph.placeholder("x")
    scaled = graph.call_function(aten.mul.Tensor, (tangent, 2))
    total = graph.call_function(aten.sum.dim_IntList, (x, [1], True))  # is recomputed
    product = graph.call_function(aten.mm.default, (x, total))
    gradient = graph.call_function(aten.sub.Tensor, (scaled, product))
    gradient = graph.call_function(aten.sum.dim_IntList, (gradient, [1]))
    graph.output((gradient,))
    with FakeTensorMode():
        tangent.meta["val"] = torch.empty(tangent_rows, 8)
        for node in (x, scaled):
            node.meta["val"] = torch.empty(8, 8)
        for node in (total, product, gradient.all_input_nodes[0], gradient):
            node.meta["val"] = torch.empty(8, 1)
    assert recomputation_waits(graph) == {}


def test_a_forward_graph_has_nothing_to_wait_for() -> None:
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    graph.output(graph.call_function(aten.mm.default, (x, x)))
    assert not delay_recomputation(graph)


def _peak(size: LlamaSize, device: torch.device) -> tuple[int, list[torch.Tensor]]:
    torch.compiler.reset()
    model, ids, target = llama(size, device)
    # without loops over heads, which leave little that could be alive at once
    options: dict[str, Any] = {"memory_budget": 0.0, "chunk": "tokens"}
    step = compiled(lambda ids, target: model(ids, target), **options)

    def run() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        step(ids, target).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    gradients = [g.clone() for g in run()]
    model.zero_grad(set_to_none=True)
    return peak_bytes(run), gradients


@pytest.mark.full
def test_loops_of_nested_recomputation_have_the_peak_of_the_plan() -> None:
    """1.06 times the simulated peak if the norms of attention's loops do not wait."""
    torch.compiler.reset()
    model, ids, labels = llama(LlamaSize(64, 2, 8, 256, 500, 2048), torch.device("cpu"))
    loss = compiled(lambda: model(ids, labels), memory_budget=0.0)
    step = Step(loss, list(model.parameters()))
    step()
    peak, planned = peak_bytes(step), reports()[-1].outcome.peak_bytes
    assert planned is not None and peak == pytest.approx(planned, rel=0.01)


@pytest.mark.full
def test_waiting_lowers_the_peak(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = LlamaSize(64, 4, 2, 96, 64, 1024)
    delayed, gradients = _peak(size, torch.device(device))
    monkeypatch.setattr(inductor_hooks, "delay_recomputation", lambda graph, hold: {})
    monkeypatch.setattr(inductor_hooks.LowerLoops, "uuid", lambda self: "not delayed")
    early, same = _peak(size, torch.device(device))
    assert delayed < 0.95 * early, (delayed, early)
    torch.testing.assert_close(gradients, same)


def test_a_finished_loop_frees_its_buffers(device: str) -> None:
    model = nn.Sequential(*(Block(32, MLPS["gelu"](32)) for _ in range(2))).to(device)
    x = torch.randn(2, 64, 32, device=device, requires_grad=True)
    step = compiled(lambda x: torch.logsumexp(model(x).sum(-1).flatten(), 0), chunk_tokens=64)
    _, code = run_fw_bw_and_get_code(lambda: step(x))
    lists = re.findall(r"(\w+) = \[None\] \* ", "\n".join(code))
    deleted = re.findall(r"del (\w+)", "\n".join(code))
    assert len(lists) == 4 and set(lists) <= set(deleted), (lists, deleted)
