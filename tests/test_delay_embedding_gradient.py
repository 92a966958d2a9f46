"""The gradient of an embedding is allocated after its rows are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mstpass import inductor_hooks
from mstpass.measure import peak_bytes
from mstpass.memory.simulate_graph import scatters_to_delay
from mstpass.schedule.finished_graphs import delay_scatters
from mstpass.torch_internals.fake_tensors import FakeTensor
from mstpass.torch_internals.graphs import tree_map
from tests.checks import compiled, errors, joint_graph

aten = torch.ops.aten
N, D, V = 1024, 64, 20_000


def _loss(ids: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
    x = torch.nn.functional.embedding(ids, table)
    scaled = [
        x * w[0].detach() for w in weights
    ]  # the products keep the matmuls from becoming one addmm
    return torch.stack([(s @ w).square().sum() for s, w in zip(scaled, weights, strict=True)]).sum()


def _inputs(count: int, device: str = "cpu") -> list[Tensor]:
    ids = torch.randint(V, (N,), device=device)
    table = torch.randn(V, D, device=device, requires_grad=True)
    return [
        ids,
        table,
        *(torch.randn(D, D, device=device, requires_grad=True) for _ in range(count)),
    ]


@pytest.mark.parametrize(("count", "waits"), [(4, True), (1, False)])
def test_a_scatter_waits_if_its_rows_free_more_than_they_take(count: int, waits: bool) -> None:
    graph = joint_graph(_loss, *_inputs(count))[0].graph
    assert bool(scatters_to_delay(graph)) == waits
    before = str(graph)
    delay_scatters(graph)
    assert (str(graph) != before) == waits


def test_on_a_gpu_the_zeros_read_the_rows_and_no_call_is_added() -> None:
    module, _ = joint_graph(_loss, *_inputs(4))
    graph = module.graph
    inputs = [_real(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
    expected = fx.Interpreter(module).run(*inputs, enable_io_processing=False)
    for node in graph.nodes:
        node.meta["val"] = tree_map(_on_a_gpu, node.meta.get("val"))
    matmuls = len(graph.find_nodes(op="call_function", target=aten.mm.default))
    (scatter,) = scatters_to_delay(graph)
    delay_scatters(graph)
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=aten.mm.default)) == matmuls
    (rows,) = graph.find_nodes(op="call_function", target=torch.ops.mstpass.realize.default)
    assert rows in scatter.all_input_nodes and rows in _computed_from(scatter.args[0])
    found = fx.Interpreter(module).run(*inputs, enable_io_processing=False)
    torch.testing.assert_close(found, expected)


def _on_a_gpu(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    data = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, data, torch.device("cuda", 0))


def _real(value: Tensor) -> Tensor:
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, dtype=value.dtype)
    return torch.randint(V, value.shape, dtype=value.dtype)


def _computed_from(node: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        operands = set(stack.pop().all_input_nodes) - found
        found |= operands
        stack += operands
    return found


def _peak(device: str) -> tuple[int, tuple[Tensor, ...]]:
    """The peak of a step that has run before, and its gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    inputs = _inputs(6, device)
    step = compiled(_loss, memory_budget=0.0)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(step(*inputs), inputs[1:])

    gradients = run()  # on CUDA this tunes kernels, with buffers of its own
    return peak_bytes(run, device), gradients


def test_waiting_lowers_the_peak(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delayed, gradients = _peak(device)
    monkeypatch.setattr(inductor_hooks, "delay_scatters", lambda graph: None)
    monkeypatch.setattr(inductor_hooks.LowerLoops, "uuid", lambda self: "not delayed")
    early, same = _peak(device)
    assert delayed < 0.85 * early, (delayed, early)
    assert max(errors(gradients, [g.double() for g in same])) < 1e-6


def _last_head(x: Tensor, weight: Tensor) -> Tensor:
    """Keys of one head, the last: their gradient is added to zeros of the size of all heads."""
    heads = (x @ weight).view(*x.shape[:-1], 6, -1)
    keys = heads[:, :, torch.tensor([-1])].transpose(1, 2).cos()
    queries = heads[:, :, :-1].transpose(1, 2)
    return (queries @ keys.expand_as(queries).transpose(-1, -2)).softmax(-1).square().sum()


@pytest.mark.slow
def test_a_scatter_in_place_has_zeros_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has a scatter write in place even where all its zeros are one element."""
    delayed: list[fx.Node] = []

    def delay(graph: fx.Graph) -> None:
        delayed.extend(scatters_to_delay(graph))
        delay_scatters(graph)

    monkeypatch.setattr(inductor_hooks, "delay_scatters", delay)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 256, 256), torch.randn(256, 6 * 64) / 64
    weight.requires_grad_()
    (found,) = torch.autograd.grad(compiled(_last_head, memory_budget=0.0)(x, weight), weight)
    (expected,) = torch.autograd.grad(_last_head(x, weight), weight)
    assert len(delayed) == 1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
