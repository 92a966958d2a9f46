"""Workspaces: computed by hand from the kernels' sources, and in the simulated peak."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from mstpass.graph.attention_sizes import attention_sizes
from mstpass.graph.device_costs import CudaDevice
from mstpass.graph.op_table import TABLE, row_of
from mstpass.memory import workspaces
from mstpass.memory.allocation import BLOCK, allocated_bytes
from mstpass.memory.workspaces import (
    ON_CUDA,
    cublas_workspace_bytes,
    node_workspace_bytes,
    product_workspace_bytes,
    workspace_bytes,
)
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.graphs import Argument, OpCall, Operand
from tests.test_simulate_graph import simulate_graph

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
H100 = CudaDevice((9, 0), 132, 227 * 1024)
A100 = CudaDevice((8, 0), 108, 163 * 1024)
A10G = CudaDevice((8, 6), 80, 99 * 1024)
MIB = 2**20
FLASH = "aten::_scaled_dot_product_flash_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
ATTENTION = sorted(
    op for op, row in TABLE.items() if row.attention is not None and row.workspace in ON_CUDA
)


def _operand(*shape: int, dtype: torch.dtype = torch.bfloat16, rows_first: bool = True) -> Operand:
    """(B, H, S, D) in memory as (B, S, H, D), as projections give it; others contiguous."""
    stride = torch.empty(shape, device="meta").stride()
    if len(shape) == 4 and rows_first:
        B, H, S, D = shape
        stride = torch.empty(B, S, H, D, device="meta").transpose(1, 2).stride()
    return Operand(shape, tuple(stride), dtype, CUDA)


def _call(
    op: str, B: int, H: int, S: int, D: int, K: int | None = None, T: int | None = None, **rest: Any
) -> OpCall:
    dtype = rest.pop("dtype", torch.bfloat16)
    query = _operand(B, H, S, D, dtype=dtype)
    key = _operand(B, K or H, T or S, D, dtype=dtype)
    arguments: dict[str, Argument] = {"query": query, "key": key, "value": key}
    gradient = "grad_out_" if "efficient" in op else "grad_out"
    if "backward" in op:
        arguments |= {gradient: query, "out": query}
    return OpCall(op, {**arguments, **rest})


def _bytes(call: OpCall, device: CudaDevice = H100) -> int:
    sizes = attention_sizes(call)
    assert sizes is not None, "the call has its operands"
    return ON_CUDA[row_of(call.op).workspace](call, sizes, device)


# ---- flash attention -----------------------------------------------------------------------------
def test_the_backward_of_flash_attention() -> None:
    """1,000 queries are rows of 1,024: a float32 gradient of them, and a sum for each."""
    sums = 4 * 2 * 8 * 1024
    assert _bytes(_call(f"{FLASH}_backward", 2, 8, 1000, 64)) == sums + sums * 64
    assert _bytes(_call(f"{FLASH}_backward", 2, 8, 1000, 80)) == sums + sums * 96
    assert _bytes(_call(f"{FLASH}_backward", 2, 8, 1000, 160)) == sums + sums * 192


def test_shared_keys_have_gradients_for_each_head() -> None:
    sums, expanded = 4 * 2 * 8 * 1024, 2 * 2 * 1000 * 8 * 64
    call = _call(f"{FLASH}_backward", 2, 8, 1000, 64, K=2)
    assert _bytes(call) == sums + sums * 64 + 2 * expanded


def test_a_gradient_of_another_layout_is_copied() -> None:
    call = _call(f"{FLASH}_backward", 2, 8, 1000, 64)
    other = _operand(2, 8, 1000, 64, rows_first=False)
    copied = OpCall(call.op, {**call.arguments, "grad_out": other})
    assert _bytes(copied) == _bytes(call) + 2 * 2 * 8 * 1000 * 64


def test_deterministic_gradients_have_a_part_for_each_split() -> None:
    call = _call(f"{FLASH}_backward", 1, 8, 1024, 64)
    sums = 4 * 8 * 1024
    torch.use_deterministic_algorithms(True)
    try:
        assert _bytes(call) == sums + 17 * sums * 64  # 132 multiprocessors / 8 heads
    finally:
        torch.use_deterministic_algorithms(False)


def test_sequences_in_one_row() -> None:
    """Three sequences of 3,000 tokens together: 128 further rows for each."""
    query = _operand(3000, 8, 64)
    starts = Operand((4,), (1,), torch.int32, CUDA)
    given: dict[str, Argument] = dict.fromkeys(("query", "key", "value", "out", "grad_out"), query)
    given |= {"cum_seq_q": starts, "cum_seq_k": starts, "max_q": 1500, "max_k": 1500}
    sums = 4 * 8 * (3000 + 3 * 128)
    assert _bytes(OpCall("aten::_flash_attention_backward", given)) == (
        allocated_bytes(sums, CUDA) + sums * 64
    )
    assert _bytes(OpCall("aten::_flash_attention_forward", given)) == 0


def test_a_forward_with_few_queries_splits_the_keys() -> None:
    """64 blocks of queries for 264 places: four splits fill 97 % of them."""
    sums = 4 * 4 * 8 * 512
    assert _bytes(_call(FLASH, 1, 8, 512, 64, T=8192)) == sums + sums * 64
    assert _bytes(_call(FLASH, 1, 8, 512, 64, T=8192, dropout_p=0.1)) == 0
    assert _bytes(_call(FLASH, 1, 32, 4096, 64)) == 0


# ---- efficient attention -------------------------------------------------------------------------
def test_the_backward_of_efficient_attention() -> None:
    op = f"{EFFICIENT}_backward"
    rows = 4 * 16 * 2048
    tiles = 4 * 16 * 32 * (64 * 64 + 4)
    assert _bytes(_call(op, 1, 16, 2048, 64)) == rows + tiles
    large = 4 * 32 * 16 * (128 * 128 + 4)  # 128 features: tiles of 128 x 128
    assert _bytes(_call(op, 1, 32, 2048, 128)) == 2 * rows + large
    assert _bytes(_call(op, 1, 32, 2048, 128), A100) == 2 * rows + large


def test_a_gpu_with_little_shared_memory_sums_in_the_workspace() -> None:
    tiles, sums = 32 * 2 * (64 * 64 + 4), 6 * 64 * (128 + 128)  # 200 / 32 = 6 splits
    found = _bytes(_call(f"{EFFICIENT}_backward", 1, 32, 2048, 128), A10G)
    assert found == 4 * 32 * (tiles + sums) + 4 * 32 * 2048


def test_float32_multiplies_the_gradient_and_the_result_first() -> None:
    rows = 4 * 16 * 2048
    call = _call(f"{EFFICIENT}_backward", 1, 16, 2048, 64, dtype=torch.float32)
    assert _bytes(call) == 2 * rows + 64 * rows


def test_the_forward_of_efficient_attention_sums_wide_results_in_memory() -> None:
    assert _bytes(_call(EFFICIENT, 1, 16, 2048, 128)) == 0
    assert _bytes(_call(EFFICIENT, 1, 16, 2048, 256)) == 4 * 16 * 2048 * 256
    assert _bytes(_call(EFFICIENT, 1, 16, 2048, 256, dtype=torch.float32)) == 0


def test_cudnn_and_flex_attention() -> None:
    sums, expanded = 4 * 8 * 1024, 2 * 1024 * 8 * 64
    cudnn = _call("aten::_scaled_dot_product_cudnn_attention_backward", 1, 8, 1024, 64, K=2)
    assert _bytes(cudnn) == sums + sums * 64 + 2 * expanded
    assert _bytes(_call("flex_attention_backward", 1, 8, 1024, 64)) == sums


# ---- properties ----------------------------------------------------------------------------------
def _sizes() -> Iterator[tuple[int, int, int, torch.dtype, CudaDevice]]:
    dtypes = (torch.bfloat16, torch.float32)
    yield from itertools.product((1, 3), (4, 32), (32, 64, 96, 128, 256), dtypes, (H100, A10G))


@pytest.mark.parametrize("op", [op for op in ATTENTION if "scaled" in op or "flex" in op])
def test_more_tokens_never_need_less(op: str) -> None:
    """But for the forward of flash attention, which splits the keys of short sequences only."""
    for batch, heads, features, dtype, device in _sizes():
        found = [
            _bytes(_call(op, batch, heads, tokens, features, dtype=dtype), device)
            for tokens in (1, 64, 127, 128, 1000, 1024, 5000, 32768)
        ]
        assert min(found) >= 0
        assert all(size % BLOCK == 0 for size in found)
        if op != FLASH:
            assert found == sorted(found)


@pytest.mark.parametrize("op", ATTENTION)
def test_calls_without_what_they_need_have_no_workspace(op: str) -> None:
    assert workspace_bytes(OpCall(op, {}), CUDA) == 0
    few = {"query": _operand(2, 3), "key": _operand(2, 3)}
    assert workspace_bytes(OpCall(op, few), CUDA) == 0
    assert workspace_bytes(OpCall(op, {**few, "value": _operand(2, 3)}), CUDA) == 0


def test_nothing_is_known_of_other_ops_and_devices() -> None:
    call = _call(f"{FLASH}_backward", 1, 8, 1024, 64)
    on_cpu = {
        name: Operand(o.shape, o.stride, o.dtype, CPU)
        for name in call.arguments
        if (o := call.operand(name)) is not None
    }
    assert workspace_bytes(call) > 0
    assert workspace_bytes(OpCall(call.op, on_cpu)) == 0
    assert workspace_bytes(OpCall("aten::sin", call.arguments)) == 0


# ---- matrix products -----------------------------------------------------------------------------
@pytest.fixture
def each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from torch 2.15 on, without settings of the environment."""
    monkeypatch.setattr(workspaces, "frees_cublas_workspaces", lambda: True)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", workspaces._CACHE):
        monkeypatch.delenv(name, raising=False)


def _product(op: str, *operands: Operand) -> OpCall:
    names = ("self", "mat1", "mat2") if op == "aten::addmm" else ("self", "mat2")
    return OpCall(op, dict(zip(names, operands, strict=True)))


@pytest.mark.usefixtures("each_time")
def test_the_workspace_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, vector = _operand(64, 64), _operand(64)
    product = _product("aten::mm", matrix, matrix)
    assert product_workspace_bytes(product, H100) == 32 * MIB
    assert product_workspace_bytes(product, A100) == 8 * MIB + 128 * 1024
    assert product_workspace_bytes(_product("aten::addmm", *[matrix] * 3), H100) == 32 * MIB
    assert product_workspace_bytes(_product("aten::addmm", vector, matrix, matrix), H100) == MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert product_workspace_bytes(product, H100) == 8 * MIB + 128 * 1024
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert product_workspace_bytes(product, H100) == 0


def test_older_versions_keep_the_workspace_of_the_first_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workspaces, "frees_cublas_workspaces", lambda: False)
    product = _product("aten::mm", _operand(64, 64), _operand(64, 64))
    assert product_workspace_bytes(product, H100) == 0
    assert cublas_workspace_bytes((9, 0)) > 0


# ---- in the simulated peak -----------------------------------------------------------------------
def _graph(device: torch.device, *shapes: tuple[int, ...]) -> tuple[fx.Graph, list[fx.Node]]:
    graph, nodes = fx.Graph(), []
    with FakeTensorMode():
        for i, shape in enumerate(shapes):
            node = graph.placeholder(f"x{i}")
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device=device)
            nodes.append(node)
    return graph, nodes


def test_buffers_on_cuda_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    for device, size in ((CPU, 2 * 3 * 3), (CUDA, BLOCK)):
        graph, (x,) = _graph(device, (3, 3))
        product = graph.call_function(aten.mm.default, (x, x))
        product.meta["val"] = x.meta["val"]
        graph.output((product,))
        assert simulate_graph(graph).peak.bytes == size


@pytest.mark.usefixtures("each_time")
def test_a_simulated_product_has_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstpass.memory.workspaces.cuda_device", lambda device: A100)
    graph, (x,) = _graph(CUDA, (256, 256))
    product = graph.call_function(aten.mm.default, (x, x))
    product.meta["val"] = x.meta["val"]
    graph.output((product,))
    assert simulate_graph(graph).peak.bytes == 2 * 256 * 256 + 8 * MIB + 128 * 1024


def test_a_simulated_attention_has_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstpass.memory.workspaces.cuda_device", lambda device: H100)
    shape = (2, 8, 1000, 64)
    graph, (query, *_) = _graph(CUDA, shape)
    given = (query, query, query, query, query, None, None, None, 1000, 1000, 0.0, True, None, None)
    node = graph.call_function(aten._scaled_dot_product_flash_attention_backward.default, given)
    copies = 2 * 2 * 2 * 8 * 1000 * 64  # of the gradient and the result, which are (B, H, S, D)
    assert node_workspace_bytes(node) == 4 * 2 * 8 * 1024 * 65 + copies
