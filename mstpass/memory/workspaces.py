"""What an op allocates while it runs, besides its results: the one place that knows.

Attention (attention_workspace.py), attention in rows and matrix products on CUDA are known; other
libraries' workspaces, such as those of convolutions, are not. Simulated peaks ask for nodes
of a graph, scheduled peaks for calls of Inductor's schedule.

**Attention of a chunk of queries.** Of graph/attention_rows.py, for a block of keys, where a row is
a query of all heads:

    forward    the rows of the queries, copied so that heads which share keys are rows, those of the
               block's result, and those of the results so far, in float32
    backward   copies of the rows of queries, results and their gradients; the gradient of the
               queries by the block, and so far; the gradients of the block's keys and values
    kernels    those of flash attention for these rows (attention_workspace.py), on CUDA with the
               gradients of a causal block's keys for all heads of the queries

**The workspace of cuBLAS**, memory of torch's allocator that a matrix product may use on CUDA.
torch gives cuBLAS a workspace of a fixed size, whatever the product::

    CUBLAS_WORKSPACE_CONFIG          the sum of its parts, such as :4096:8 (KiB, count)
    else, compute capability 9 to 12 32 MiB
    else                             8.125 MiB
    products with a bias, by cuBLASLt CUBLASLT_WORKSPACE_SIZE KiB, else 1 MiB

Older versions of torch allocate it at the first product of a thread and a stream and then keep it.
It exists before a step that is measured begins, so it is no part of the step's peak; `mstpass plan`
counts it as overhead. In newer ones each product allocates it and frees it afterwards, unless
TORCH_CUBLAS_WORKSPACE_CACHE=1: then it is part of the peak, if a product runs at the peak.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (``parseChosenWorkspaceSize``,
``getCurrentCUDABlasHandleWithWorkspace``). A size that the program sets itself, by
``torch.backends.cuda.cublas_workspace_size``, is not seen here.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph.attention_rows import keys_of_block
from mstpass.graph.attention_sizes import AttentionSizes, argument_of, attention_sizes, call_of
from mstpass.graph.device_costs import CudaDevice, cuda_device
from mstpass.graph.op_rows import row
from mstpass.graph.op_table import TABLE, row_of
from mstpass.memory import attention_workspace
from mstpass.memory.allocation import allocated_bytes
from mstpass.memory.attention_workspace import cpu_flash_bytes
from mstpass.torch_internals.graphs import OpCall, Operand, name_of, op_call
from mstpass.torch_internals.versions import frees_cublas_workspaces

_FLOAT = torch.float32.itemsize


def rows_bytes(sizes: AttentionSizes) -> int:
    """The bytes of a call for the rows of one chunk."""
    rows, size = sizes.B * sizes.H * sizes.S * sizes.D, sizes.dtype.itemsize
    wide = max(size, _FLOAT)
    block = min(sizes.T, keys_of_block(sizes.S)) if sizes.backward else sizes.T
    # the queries of all heads that read one head of keys are its rows
    of_block = dataclasses.replace(sizes, S=sizes.H // sizes.K * sizes.S, T=block)
    kernels = cpu_flash_bytes(of_block) if sizes.device.type == "cpu" else 0
    if not sizes.backward:
        merged = rows * wide if size < wide else 0
        return rows * (2 * size + wide) + merged + kernels
    features = sizes.D + sizes.E
    of_keys = sizes.B * sizes.K * block * features * size
    if sizes.device.type == "cuda":
        of_keys = max(of_keys, sizes.H * min(sizes.S, block) * features * size)
        # sums of the queries' gradient, of rows
        kernels = rows * _FLOAT + sizes.H * sizes.S * _FLOAT
    return rows * (4 * size + wide) + of_keys + kernels


_KIB, _MIB = 2**10, 2**20
_DEFAULT, _DEFAULT_LARGE = 8 * _MIB + 128 * _KIB, 32 * _MIB
_LARGE = range(9, 13)  # major compute capabilities
_LT_KIB = 1024
_CACHE = "TORCH_CUBLAS_WORKSPACE_CACHE"
_TRUE = frozenset({"1", "y", "yes", "on", "t", "true"})  # c10/util/env.h: ``check_env``

_WITH_BIAS = {"aten::addmm": "self"}


def product_workspace_bytes(call: OpCall, device: CudaDevice) -> int:
    """What one product allocates besides its result."""
    if is_kept():
        return 0
    bias = call.operand(_WITH_BIAS.get(call.op, ""))
    if call.op == "extern_kernels.bias_addmm" or (bias is not None and len(bias.shape) == 1):
        return _lt_bytes()
    return cublas_workspace_bytes(device.capability)


def is_kept() -> bool:
    """Whether the first product allocates a workspace for all later ones."""
    if not frees_cublas_workspaces():
        return True
    return os.environ.get(_CACHE, "").lower() in _TRUE


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """The size of one workspace."""
    parts = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if parts:
        return sum(int(size) * _KIB * int(count) for size, count in parts)
    return _DEFAULT_LARGE if capability[0] in _LARGE else _DEFAULT


def _lt_bytes() -> int:
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(given) if given.isdigit() else _LT_KIB) * _KIB


# The names are those of ``Op.workspace``.
_OfAttention = Callable[[OpCall, AttentionSizes, CudaDevice], int]
ON_CUDA: Mapping[str, _OfAttention] = {
    row.FLASH: attention_workspace.flash_forward_bytes,
    row.FLASH_BACKWARD: attention_workspace.flash_backward_bytes,
    row.EFFICIENT: attention_workspace.efficient_forward_bytes,
    row.EFFICIENT_BACKWARD: attention_workspace.efficient_backward_bytes,
    row.CUDNN_BACKWARD: attention_workspace.cudnn_backward_bytes,
    row.FLEX_BACKWARD: attention_workspace.flex_backward_bytes,
}
ANYWHERE: Mapping[str, Callable[[AttentionSizes], int]] = {
    row.CPU_FLASH: cpu_flash_bytes,
    row.ROWS: rows_bytes,
    row.ROWS_BACKWARD: rows_bytes,
}
KNOWN = frozenset(name_of(op) for op, known in TABLE.items() if known.workspace)


def workspace_bytes(call: OpCall, device: torch.device | None = None) -> int:
    """The bytes of a call's workspace; 0 where none is known.

    Args:
        device: where the call runs; None: where its operands are.
    """
    workspace, sizes = row_of(call.op).workspace, None
    if workspace != row.PRODUCT and (sizes := attention_sizes(call)) is None:
        return 0
    if sizes is not None and workspace in ANYWHERE:
        return ANYWHERE[workspace](sizes)
    if device is None:
        device = next((a.device for a in call.arguments.values() if isinstance(a, Operand)), None)
    if not workspace or device is None or device.type != "cuda":
        return 0
    if sizes is None:
        return allocated_bytes(product_workspace_bytes(call, cuda_device(device)), device)
    return ON_CUDA[workspace](call, sizes, cuda_device(device))


def node_workspace_bytes(node: fx.Node) -> int:
    """The same for a node of a graph; its symbolic sizes count with their hints."""
    if node.op != "call_function" or name_of(node.target) not in KNOWN:
        return 0
    return workspace_bytes(call_of(node))


def eager_workspace_bytes(target: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """The same for an op that is run on tensors, as if they were on a device."""
    if name_of(target) not in KNOWN:
        return 0
    return workspace_bytes(op_call(target, args, kwargs, argument_of), device)
