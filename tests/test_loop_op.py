"""The loop op by itself: what it computes in eager mode, and buffers donated beside it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from mstpass import pipeline
from mstpass.graph import loop_op
from mstpass.graph.buffer_ops import counter
from mstpass.graph.loop_op import MAX, STACK, SUM, mst_loop, run_eagerly
from mstpass.graph.own_ops import REALIZE
from mstpass.loops.lowering import lower_loops
from mstpass.loops.while_loop_step import LoopCall
from mstpass.options import Options
from mstpass.torch_internals import aot_autograd
from tests.checks import compiled, joint_graph
from tests.models import MLPS

aten = torch.ops.aten


@pytest.mark.parametrize("chunk", [1, 7, 16, 31])
def test_every_row_is_stacked_and_summed_once(chunk: int) -> None:
    x, w = torch.randn(31, 4, dtype=torch.double), torch.randn(4, 3, dtype=torch.double)
    num_chunks = -(-31 // chunk)
    ragged = num_chunks * chunk != 31

    def body(rows: torch.Tensor, w: torch.Tensor, *valid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = rows @ w
        kept = torch.where(valid[0][:, None], y, 0) if ragged else y
        return y, kept.sum(0)

    specs = ((STACK, (31, 3), torch.double), (SUM, (3,), torch.double))
    for run in (run_eagerly, mst_loop):
        stacked, summed = run(body, num_chunks, chunk, 31, specs, (x,), (w,))
        torch.testing.assert_close(stacked, x @ w)
        torch.testing.assert_close(summed, (x @ w).sum(0))


@pytest.mark.parametrize("chunk", [2, 7, 16, 30])
def test_rows_in_the_overlap_are_the_last_chunk_s(chunk: int) -> None:
    """In all outputs alike: what two chunks make of a row may differ in its last bits."""
    x, num_chunks = torch.rand(31, 4), -(-31 // chunk)
    chunks = iter(range(num_chunks))

    def body(rows: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = rows + 10 * next(chunks)
        kept = torch.where(valid[:, None], y, 0)
        return y, kept.sum(0), kept.amax(0)

    shape, dtype = (4,), torch.float32
    specs = ((STACK, (31, 4), dtype), (SUM, shape, dtype), (MAX, shape, dtype))
    stacked, summed, largest = run_eagerly(body, num_chunks, chunk, 31, specs, (x,), ())
    torch.testing.assert_close(summed, stacked.sum(0))
    torch.testing.assert_close(largest, stacked.amax(0))
    body_module = torch.fx.GraphModule({}, torch.fx.Graph())
    call = LoopCall(body_module, specs, 1, 0, (), num_chunks, chunk, 31)
    seen = [valid for i in range(num_chunks) for valid in call._fixed_chunk(i, (x,))[-1]]
    masks = [valid for _, _, _, (valid,) in loop_op._chunks(num_chunks, chunk, 31, x.device)]
    assert all(map(torch.equal, seen, masks)) and len(seen) == len(masks)


@pytest.mark.parametrize("tokens", [0, 1, 7, 15, 16, 17, 31, 32, 127, 130])
@pytest.mark.parametrize("chunk", [15, 64])
def test_chunks_that_fit_the_tokens(tokens: int, chunk: int) -> None:
    x, w = torch.randn(tokens, 4, dtype=torch.double), torch.randn(4, 3, dtype=torch.double)
    lengths = []

    def body(rows: int, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert x.shape[0] == rows
        lengths.append(rows)
        return x @ w, (x @ w).sum(0)

    specs = ((STACK, (tokens, 3), torch.double), (SUM, (3,), torch.double))
    stacked, summed = run_eagerly(body, None, chunk, tokens, specs, (x,), (w,))
    torch.testing.assert_close(stacked, x @ w)
    torch.testing.assert_close(summed, (x @ w).sum(0))
    assert sum(lengths) == tokens and len(lengths) == -(-tokens // chunk)
    assert max(lengths, default=0) <= chunk and len(set(lengths[:-1])) <= 1
    if chunk == 64:
        assert all(length % 16 == 0 for length in lengths[:-1]), "rows stay aligned"
    else:
        assert not lengths or max(lengths) - min(lengths) < len(lengths)


def test_inputs_that_start_inside_their_storage() -> None:
    """A storage offset of an input (rows or labels) must not shift its slices."""
    x = torch.randn(257, 32)[1:].requires_grad_()
    ids = torch.randint(600, (1, 257))
    mlp, head = MLPS["gelu"](32), nn.Linear(32, 600)

    def loss(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        labels = ids[:, 1:].contiguous()  # a view at offset 1: B is 1
        return F.cross_entropy(head(torch.tanh(mlp(x))), labels.flatten())

    step = compiled(loss, chunk_tokens=64)
    expected = torch.autograd.grad(loss(x, ids), [x, *mlp.parameters()])
    found = torch.autograd.grad(step(x, ids), [x, *mlp.parameters()])
    torch.testing.assert_close(step(x, ids), loss(x, ids))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_what_a_loop_reads_is_written_before_its_buffers_exist() -> None:
    mlp = MLPS["gelu"](32)
    joint, outputs = joint_graph(lambda x, y: mlp(x + y).sum(), *torch.randn(2, 256, 32))
    result = pipeline.run(joint, Options(chunk_tokens=64), num_fwd_outputs=outputs)
    assert result.modules is not None
    graph = result.modules[0].graph
    assert lower_loops(graph) == 1
    order = [node.target for node in graph.nodes]
    assert order.count(REALIZE) == 1
    assert order.index(aten.add.Tensor) < order.index(REALIZE) < order.index(counter)
    assert order.index(counter) < order.index(aten.empty.memory_format)


def _backward_graph() -> fx.Graph:
    graph = fx.Graph()
    graph.placeholder("tangents_1")
    graph.output(())
    return graph


def test_no_subgraph_has_the_donations_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = SimpleNamespace(bw_donated_idxs=[0, 2])
    context = SimpleNamespace(fw_metadata=metadata)
    monkeypatch.setattr(aot_autograd.TracingContext, "try_get", staticmethod(lambda: context))
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    aot_autograd.keep_donations_from_subgraphs(_backward_graph())
    found = metadata.bw_donated_idxs
    assert found == [0, 2] and 2 in found and 1 not in found
    with aot_autograd.V.set_graph_handler(object.__new__(aot_autograd.SubgraphLowering)):
        assert 2 not in found
    assert type(pickle.loads(pickle.dumps(found))) is list  # in torch's caches
