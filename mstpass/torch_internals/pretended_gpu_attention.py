"""The kernel that CUDA would choose for ``scaled_dot_product_attention``, for a pretended GPU.

CUDA's own choice asks the driver. Here the same conditions are asked of the same tensors, with the
capability of the pretended GPU in place of the driver's answer:

    sm_90 and sm_100    cuDNN, flash, efficient, math: the first that can
    others              flash, efficient, cuDNN, math

A kernel that ``torch.backends.cuda`` disables is left out. Source:
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp (2.15; since 2.10 cuDNN comes
first where its version is above 9.15, as in the wheels for 2.11 to 2.15).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_WIDTH, _FLASH_WIDTH = 128, 256  # largest size of a head
_MASK_ALIGNMENT, _FLASH_ALIGNMENT = 16, 8


@contextmanager
def attention_of(capability: tuple[int, int]) -> Iterator[None]:
    """Attention on CUDA tensors is the kernel that a GPU of this capability would run."""

    def attention(*args: Any, **given: Any) -> Tensor:
        return _Call(*args, **given).run(capability)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
        yield
    finally:
        library._destroy()


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call, with the conditions of each kernel.

    The fields are in the order of the op's arguments; the last two have their names.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def width(self) -> int:
        return int(self.query.shape[-1])

    def run(self, capability: tuple[int, int]) -> Tensor:
        settings = torch.backends.cuda
        cudnn = settings.cudnn_sdp_enabled() and self._cudnn_can(capability)
        if cudnn and capability[0] in (9, 10):
            return self._cudnn()
        if settings.flash_sdp_enabled() and self._flash_can(capability):
            return self._flash()
        if settings.mem_efficient_sdp_enabled() and self._efficient_can(capability):
            return self._efficient()
        return self._cudnn() if cudnn else self._math()

    # ---- conditions ----------------------------------------------------------------------------
    def _is_dense(self) -> bool:
        kinds = {(t.dtype, t.dim()) for t in self._tensors()}
        return kinds == {(self.query.dtype, 4)}

    def _cudnn_can(self, capability: tuple[int, int]) -> bool:
        widths = (self.width, int(self.value.shape[-1]))
        return (
            self._is_dense()
            and capability >= (8, 0)
            and self.query.dtype in _HALF
            and all(width <= _CUDNN_WIDTH and width % 8 == 0 for width in widths)
            and not torch.are_deterministic_algorithms_enabled()
            and (self.dropout * 16).is_integer()
        )

    def _flash_can(self, capability: tuple[int, int]) -> bool:
        square = not self.causal or self.query.shape[-2] == self.key.shape[-2]
        return (
            self._is_dense()
            and capability >= (8, 0)
            and self.mask is None
            and self.query.dtype in _HALF
            and self.width == self.value.shape[-1] <= _FLASH_WIDTH
            and square
        )

    def _efficient_can(self, capability: tuple[int, int]) -> bool:
        known = (*_HALF, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
        aligned = 16 // self.query.element_size() if self.query.dtype in known else 1
        widths = (self.width, int(self.value.shape[-1]))
        return (
            self._is_dense()
            and self.query.dtype in known
            and not self.enable_gqa
            and all(width % aligned == 0 for width in widths)
        )

    # ---- kernels -------------------------------------------------------------------------------
    def _needs_logsumexp(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self._tensors())

    def _bias(self) -> Tensor | None:
        """A mask of booleans as one that is added."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        zero = torch.zeros((), dtype=self.query.dtype, device=self.mask.device)
        return torch.where(self.mask, zero, float("-inf"))

    def _cudnn(self) -> Tensor:
        operands = (*self._tensors(), self._bias(), self._needs_logsumexp())
        options = (self.dropout, self.causal, False)
        return aten._scaled_dot_product_cudnn_attention(*operands, *options, scale=self.scale)[0]

    def _flash(self) -> Tensor:
        scale = self.width**-0.5 if self.scale is None else self.scale
        missing = -self.width % _FLASH_ALIGNMENT
        padded = [F.pad(t, (0, missing)) if missing else t for t in self._tensors()]
        options = (self.dropout, self.causal, False)
        result = aten._scaled_dot_product_flash_attention(*padded, *options, scale=scale)[0]
        return result[..., : self.width] if missing else result

    def _efficient(self) -> Tensor:
        bias = self._bias()
        if bias is not None:
            keys = bias.shape[-1]
            missing = -keys % _MASK_ALIGNMENT
            if missing:  # rows of the mask have to be aligned in memory
                bias = F.pad(bias, (0, missing))[..., :keys]
            bias = bias.expand(*self.query.shape[:3], self.key.shape[2])
        operands = (*self._tensors(), bias, self._needs_logsumexp(), self.dropout, self.causal)
        return aten._scaled_dot_product_efficient_attention(*operands, scale=self.scale)[0]

    def _math(self) -> Tensor:
        operands = (*self._tensors(), self._bias(), self.dropout, self.causal)
        options = {"scale": self.scale, "enable_gqa": self.enable_gqa}
        return aten._scaled_dot_product_attention_math(*operands, **options)[0]

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value
