"""The workspace of flash attention on the CPU: scratch memory while the kernel runs.

Each thread holds a block of scores, queries x keys in float32, and a block of results (forward) or
of the scores' gradient (backward). Inputs of a narrower dtype need a copy of the scores in that
dtype. Block sizes: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MOST_KEYS = 512  # in a block
_QUERIES = ((768, 256), (192, 64), (0, 32))  # from so many queries on, so many in a block


def flash_attention_bytes(
    query_shape: Sequence[int], key_shape: Sequence[int], dtype: torch.dtype, backward: bool
) -> int:
    """Bytes of workspace in all threads, for query and key of shapes ``(..., S, D)``."""
    queries, features = query_shape[-2:]
    rows = min(queries, next(block for least, block in _QUERIES if queries >= least))
    keys = min(key_shape[-2], _MOST_KEYS)
    elements = rows * (2 * keys if backward else keys + features + 2)
    element_bytes = torch.float32.itemsize
    if dtype.itemsize < element_bytes:
        elements += rows * keys // 2 * (2 if backward else 1)
    return torch.get_num_threads() * elements * element_bytes
