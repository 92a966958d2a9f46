"""The workspace of cuBLAS: memory of torch's allocator that a matrix product may use on CUDA.

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

import os
import re

from mstpass.memory.cuda_device import CudaDevice
from mstpass.torch_internals.graphs import OpCall
from mstpass.torch_internals.versions import frees_cublas_workspaces

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
