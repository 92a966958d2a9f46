"""Which fused attention op the device's own dispatch chooses, and a call of one with a window.

``scaled_dot_product_attention`` asks the device which kernel can take its operands. Here it is
asked on fake tensors of the same shapes and strides, so that the answer is what a trace of the same
call would hold: on CUDA that of the driver's GPU, for a pretended GPU that of
pretended_gpu_attention.py. Where there is neither, nobody is asked: a build of torch for the CPU
ends the process. Source: aten/src/ATen/native/transformers/attention.cpp (2.11 to 2.15).

Flash attention's own op takes a window, ``i - left <= j <= i + right``; ``-1`` is no bound. It is
what torch.nn.attention.varlen calls. Its tensors are ``[B, N, heads, d]``. The ops for the CPU, of
cuDNN and of memory-efficient attention have no window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mstpass.torch_internals.batch_sizes import hint
from mstpass.torch_internals.fake_tensors import FakeTensor, TorchDispatchMode
from mstpass.torch_internals.graphs import OpOverload, schema_of

aten = torch.ops.aten
FLASH = "aten::_scaled_dot_product_flash_attention"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
FUSED = frozenset((FLASH, CUDNN, EFFICIENT, CPU_FLASH))


class _FusedOps(TorchDispatchMode):
    """Sees the names of the fused attention ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and schema_of(func).name in FUSED:
            self.names.append(schema_of(func).name)
        return func(*args, **(kwargs or {}))


def chosen_kernel(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> str | None:
    """The op that attention without mask and dropout dispatches to; None if it is not fused."""
    return _dispatched(query, key, value, causal, scale)


def has_window(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Whether flash attention, whose kernel has a window, can take these operands."""
    if query.device.type != "cuda":
        return False
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _dispatched(query, key, value, True, scale) == FLASH


def _dispatched(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> str | None:
    assert isinstance(query, FakeTensor), "the query is a fake tensor"
    if query.device.type == "cuda" and not torch.cuda.is_available():
        return None
    with query.fake_mode, _FusedOps() as seen, torch.enable_grad():
        operands = [
            torch.empty_strided(
                list(map(hint, one.shape)),
                list(map(hint, one.stride())),
                dtype=one.dtype,
                device=one.device,
                requires_grad=True,
            )
            for one in (query, key, value)
        ]
        try:
            aten.scaled_dot_product_attention(*operands, is_causal=causal, scale=scale)
        except RuntimeError:  # no kernel that is enabled can take them
            return None
    return seen.names[0] if seen.names else None
